/* The synchronisation protocol of the kernels: prepare, megakernel, next launch, on 2 or 3 ranks.
 *
 * Each rank has a stream (prepare kernels, and the start and end of megakernels), a pulling warp and WORKERS compute
 * CTAs. README.md maps each step to the kernel function that does it, and says what is left out. In short: a block of
 * rows is a minibatch and has one row from each source; a tile is a block wide; the shared expert is left out.
 */
#include "state.pml"

#include "compute.pml"

/* ================================================================== prepare kernel, and the frame of a megakernel */
#define ROUTES_HERE(p) (routes_flag[AT(r, p)] >= e - (FAULT == ROUTES_FLAG_OF_WRONG_EPOCH))

proctype Stream(byte r; byte actor) {
    byte l, layer, p, e;
    bool ok;

    for (l : 1 .. LAUNCHES) {
        /* ---- prepare_kernel: nothing after a stop; then routes and announcement to every peer, counters, the input */
        TOGETHER {
            EACH {
                GO_ON;
                if :: stop[r] && FAULT != ACTIVE_AFTER_STOP -> goto gone :: else -> skip fi;
                layer = LAYER(l); e = epoch[r] + 1; p = r; ok = true
            };
            do :: EACH {  /* send_routes, announce */
                GO_ON;
                if :: !FORWARD(l) && FAULT == BACKWARD_NOT_ANNOUNCED -> break :: else -> skip fi;
                if :: FORWARD(l) -> ids[AT(p, r)] = l :: else -> skip fi;
                announced[AT(p, r)] = 2 * l + FORWARD(l); wrote(GLOBAL_IDS(p, r));
                RELEASE_FLAG(ROUTES_FLAG(p, r), ROUTES_WITHOUT_RELEASE); routes_flag[AT(p, r)] = e;
                p = NEXT(p);
                if :: p == r -> break :: else -> skip fi
            } od
        };
        atomic {  /* clear_counters, copy_input */
            GO_ON;
            d_step {
                if
                :: FAULT != COUNTERS_NOT_CLEARED -> for (i : 0 .. COUNTERS - 1) { COUNT(r, i) = 0 } i = 0
                :: else -> skip
                fi;
                next_tile[r] = 0; failed[r] = 0
            }
            input[r] = l; wrote(GLOBAL_INPUT(r));
            if
            :: !FORWARD(l) && dispatch_again[OFLAYER(r, layer)] && FAULT != X_NOT_STAGED_AGAIN ->
                input_again[r] = l; wrote(GLOBAL_AGAIN(r))
            :: else -> skip
            fi
        }
        TOGETHER {
            EACH {  /* prepare_kernel: all ranks' routes are here */
                if :: FORWARD(l) -> WAIT(EVERY(ROUTES_HERE)) :: else -> ok = true fi;
                GO_ON;
                if
                :: ok && FORWARD(l) ->
                    for (p : 0 .. RANKS - 1) {
                        ACQUIRE_FLAG(ROUTES_FLAG(r, p), ROUTES_WITHOUT_ACQUIRE);
                        KNOWS(GLOBAL_IDS(r, p)); assert(announced[AT(r, p)] / 2 == l);
                        if
                        :: announced[AT(r, p)] % 2 == 1 -> assert(ids[AT(r, p)] == l)
                        :: else -> failed[r] = DONE_OTHER_STEP; error[r] = OTHER_STEP
                        fi
                    }
                    if  /* schedule_nothing */
                    :: failed[r] && FAULT == OTHER_STEP_NOT_TOLD -> stop[r] = true; goto gone
                    :: failed[r] && FAULT != OTHER_STEP_NOT_TOLD -> N = 0
                    :: else -> skip
                    fi;
                    dispatch_again[OFLAYER(r, layer)] = false; p = r
#ifdef OVERFLOW
                    ;
                    if
                    :: r == OVERFLOW ->  /* more rows than the schedule's capacity */
                        N = 0; failed[r] = DONE_OVERFLOWED; overflowed_in[r] = l; error[r] = OVERFLOWED
                    :: true -> skip
                    fi
#endif
                :: !ok && FAULT != ACTIVE_AFTER_STOP -> goto gone
                :: else -> skip
                fi;
                /* ---- the megakernel starts */
                kernel_boundary(); running[r] = l
            };
            do :: EACH {  /* its first CTA tells the peers that the input may be pulled */
                GO_ON;
                RELEASE_FLAG(INPUT_FLAG(p, r), INPUT_WITHOUT_RELEASE); input_flag[AT(p, r)] = e;
                p = NEXT(p);
                if :: p == r -> break :: else -> skip fi
            } od
        };

        /* ---- and ends. The last CTA to leave counts the launch, if none was stopped. */
        atomic {
            if :: left[r] == 1 + WORKERS_OF(r) -> skip :: !ALIVE -> goto gone fi;
            kernel_boundary();
            if
            :: exited[r] == 1 + WORKERS_OF(r) ->
                epoch[r] = e;
                /* Who needs rows of a rank that had none knows it by now. */
                for (p : 0 .. RANKS - 1) { assert(!(FORWARD(l) && overflowed_in[p] == l) || error[r] != 0) }
            :: else -> assert(stop[r] && error[r] != 0)
            fi;
            left[r] = 0; exited[r] = 0; p = 0; layer = 0; e = 0; ok = false
        }
    }
gone:
    atomic { over[r] = true; l = 0; layer = 0; p = 0; e = 0; ok = false }
}

/* ================================================================== Puller::run, with pull_job of either direction */
#define INPUT_HERE(p) (!SENDS(p, r, layer) || p == r || FAULT == PULL_BEFORE_INPUT_FLAG \
                       || input_flag[AT(r, p)] >= e - (FAULT == INPUT_FLAG_OF_WRONG_EPOCH))

/* Forward: the x that was here has been multiplied. Backward: all tiles of the macrobatches before are done. */
#define PLACE_FREE \
    (kind == JOB_X -> b < RING || FAULT == X_RING_REUSED_EARLY || COUNT(r, OF(FC1, b - RING)) >= 1 \
                    : !AGAIN(m) || FAULT == BACKWARD_RING_REUSED_EARLY || COUNT(r, TILES_DONE) >= before)

#define NO_JOB 0
#define JOB_X 1
#define JOB_X_AGAIN 2
#define JOB_DY 3

/* Job number t: which rows, to be pulled after how many tiles. */
inline pull_job() {
    d_step {
        kind = NO_JOB; m = 0; before = 0; j = (FORWARD(l) || N == 0 -> 0 : MACROBATCHES); i = t;
        if
        :: FORWARD(l) && t < N -> kind = JOB_X; b = t
        :: else -> skip
        fi;
        do
        :: j == 0 -> break
        :: else ->
            j--; m = j; k = COUNT_OF(m);
            if
            :: i >= k * (1 + AGAIN(m)) -> i = i - k * (1 + AGAIN(m)); before = before + TILES_OF(m)
            :: else -> kind = (i < k * AGAIN(m) -> JOB_X_AGAIN : JOB_DY); b = m * RING + i % k; break
            fi
        od;
        i = 0; j = 0; k = 0
    }
}

proctype Pull(byte r; byte actor) {
    byte l, layer, p, e, t, kind, b, m, before;
    bool ok;

    for (l : 1 .. LAUNCHES) {
        atomic {
            if :: running[r] == l -> skip :: over[r] && running[r] != l -> goto gone :: !ALIVE -> goto gone fi;
            layer = LAYER(l); e = epoch[r] + 1; ok = true
        }
        do
        :: atomic {
            pull_job();
            WAIT(kind == NO_JOB || (PLACE_FREE && EVERY(INPUT_HERE)));
            GO_ON;
            if
            :: !ok && FAULT == ROWS_COUNTED_AFTER_STOP ->
                if
                :: kind == JOB_DY -> COUNT(r, OF(ROWS_DY, b))++
                :: kind == JOB_X || kind == JOB_X_AGAIN -> COUNT(r, OF(ROWS_X, b))++
                :: else -> skip
                fi
            :: else -> skip
            fi;
            if :: kind == NO_JOB || !ok -> leave(); t = 0; break :: else -> skip fi;
            if
            :: kind == JOB_X && b >= RING -> ACQUIRE(OF(FC1, b - RING), MACROBATCH_WITHOUT_ACQUIRE)
            :: kind != JOB_X -> ACQUIRE(TILES_DONE, MACROBATCH_WITHOUT_ACQUIRE)
            :: else -> skip
            fi;
            for (p : 0 .. RANKS - 1) {
                if
                :: SENDS(p, r, layer) && p != r ->
                    ACQUIRE_FLAG(INPUT_FLAG(r, p), INPUT_WITHOUT_ACQUIRE);
                    if
                    :: kind == JOB_X_AGAIN -> KNOWS(GLOBAL_AGAIN(p)); right(input_again[p] == l)
                    :: else -> KNOWS(GLOBAL_INPUT(p)); right(input[p] == l)
                    fi
                :: else -> skip
                fi
            }
            if
            :: kind == JOB_DY ->
                dy_rows[RINGS(r, b)] = TAG(l, b); wrote_local(LOCAL_DY(b));
                RELEASE(OF(ROWS_DY, b), ROWS_WITHOUT_RELEASE); COUNT(r, OF(ROWS_DY, b))++
            :: else ->
                x_rows[KEPT(r, layer, b)] = TAG(layer, b); wrote_local(LOCAL_X(layer, b));
                RELEASE(OF(ROWS_X, b), ROWS_WITHOUT_RELEASE); COUNT(r, OF(ROWS_X, b))++
            fi;
            t++; p = 0; b = 0; m = 0; before = 0; kind = 0
        }
        od;
    }
gone:
    atomic { l = 0; layer = 0; e = 0; t = 0; b = 0; m = 0; before = 0; kind = 0; ok = false }
}

/* ================================================================== the group */
#define ALL ((1 << RANKS) - 1)

init {
    byte r, layer;
    atomic {
#ifdef SEEDED
        c_code { now.seeded = atoi(getenv("FAULT")); };
#endif
        for (r : 0 .. RANKS - 1) {
            for (layer : 0 .. LAYERS - 1) {
                blocks[OFLAYER(r, layer)] = BLOCKS; sources[OFLAYER(r, layer)] = ALL
#ifdef ANY_ROUTING
                ;
                if
                :: layer < ANY_ROUTING - 1 -> N = (r == 0 -> 1 : BLOCKS)  /* rank 0 evicts nothing itself */
                :: layer > 0 && ANY_ROUTING == 1 ->  /* as in the first layer */
                    blocks[OFLAYER(r, layer)] = blocks[OFLAYER(r, 0)];
                    sources[OFLAYER(r, layer)] = sources[OFLAYER(r, 0)]
                :: else ->
                    if
                    :: skip
                    :: sources[OFLAYER(r, layer)] = 1 << r
                    :: sources[OFLAYER(r, layer)] = ALL - (1 << r)
                    :: blocks[OFLAYER(r, layer)] = 1
                    :: blocks[OFLAYER(r, layer)] = 0
                    fi
                fi
#endif
            }
        }
        for (r : 0 .. RANKS - 1) {
            run Stream(r, 0); run Pull(r, 1);
            for (layer : 1 .. WORKERS_OF(r)) { run Compute(r, layer + 1) }
        }
        r = 0; layer = 0
    }
#ifdef DEAD
    /* At any moment, or never in time. */
    dead = true;
#endif
    /* Everyone has ended. A rank either finished all its launches or has an error. */
    atomic {
        for (r : 0 .. RANKS - 1) {
            if
            :: over[r] -> skip
#ifdef DEAD
            :: r == DEAD && dead -> skip
#endif
            fi
        }
        for (r : 0 .. RANKS - 1) {
            if
#ifdef DEAD
            :: r == DEAD -> skip
#endif
#ifdef DIFFERS
            :: true -> assert(error[r] == OTHER_STEP && epoch[r] == LAUNCHES)
#endif
            :: else -> assert(error[r] != 0 || epoch[r] == LAUNCHES)
            fi
        }
    }
}
