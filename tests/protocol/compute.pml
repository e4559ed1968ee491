/* A compute CTA: tiles in the order of the list (schedule_tiles, ForwardProgram and BackwardProgram), the done flags,
 * and the sum over k. A tile is taken in one step and runs in a second one, as soon as it is ready. */

#define NO_TILE 0
#define KIND_FC1 1
#define KIND_FC2 2
#define KIND_DHIDDEN 3
#define KIND_DX 4
#define KIND_DWEIGHT 5

/* Of macrobatch m. Each boundary between two macrobatches cuts an expert of its own: so a macrobatch has
 * an expert to be continued by the one below, then one that continues the one above. */
#define COUNT_OF(m) (N - (m) * RING < RING -> N - (m) * RING : RING)
#define AGAIN(m) ((m) < MACROBATCHES - 1)
#define DWEIGHT_TILES(m) (MACROBATCHES == 1 -> 1 : ((m) > 0) + AGAIN(m))
#define TILES_OF(m) (COUNT_OF(m) * (2 + AGAIN(m)) + DWEIGHT_TILES(m))

/* phase_tile: [first(0)] [first(1) second(0)] ... [second(last)] of `count` minibatches */
inline lagged(index, count, first, second) {
    if
    :: index == 0 -> kind = first; b = 0
    :: index > 0 && index == 2 * (count) - 1 -> kind = second; b = (count) - 1
    :: else ->
        if
        :: index % 2 == 1 -> kind = first; b = (index + 1) / 2
        :: else -> kind = second; b = index / 2 - 1
        fi
    fi
}

inline forward_tile() {
    if
    :: t >= 2 * N -> kind = NO_TILE
    :: else ->
        if
        :: RING >= 2 || FAULT == LAG_IN_SHORT_RING -> lagged(t, N, KIND_FC1, KIND_FC2)
        :: else -> b = t / 2; kind = (t % 2 == 0 -> KIND_FC1 : KIND_FC2)
        fi
    fi
}

inline backward_tile() {
    kind = NO_TILE; j = MACROBATCHES;
    do
    :: j == 0 -> break
    :: else ->
        j--;
        if
        :: t >= TILES_OF(j) -> t = t - TILES_OF(j)
        :: else ->
            m = j; k = COUNT_OF(m);
            if
            :: t < AGAIN(m) * k -> kind = KIND_FC1; b = m * RING + t
            :: t >= AGAIN(m) * k && t < (2 + AGAIN(m)) * k ->
                t = t - AGAIN(m) * k; lagged(t, k, KIND_DHIDDEN, KIND_DX); b = b + m * RING
            :: else ->
                kind = KIND_DWEIGHT; b = t - (2 + AGAIN(m)) * k;
                carry_out = m > 0 && b == 0; carry_in = AGAIN(m) && !carry_out
            fi;
            break
        fi
    od
}

/* Rows of block b to the slots (or the router weights' partial sums) of their sources. */
#define PUSH(to, datum) \
    for (p : 0 .. RANKS - 1) { \
        if :: SENDS(p, r, layer) -> to[SLOT(p, r, b)] = l; wrote(datum(p, r, b)) :: else -> skip fi \
    } \
    p = 0

/* tile_pushed: the last tile whose rows the sum over k reads tells every peer. */
#define PUSHING_TILES(l) (FORWARD(l) -> N : 2 * N)
#define PUSHED \
    RELEASE(TILES_PUSHED, PUSHED_WITHOUT_RELEASE); COUNT(r, TILES_PUSHED)++; \
    ACQUIRE(TILES_PUSHED, PUSHED_WITHOUT_ACQUIRE); \
    tell = COUNT(r, TILES_PUSHED) == (FAULT == DONE_BY_FIRST_TILE -> 1 : PUSHING_TILES(l))

#define CARRY(m) (FAULT == ONE_CARRY_BUFFER -> 0 : (m) % 2)

inline run_forward_tile() {
    if
    :: kind == KIND_FC1 ->
        WAIT((FAULT == TILE_BEFORE_ROWS || COUNT(r, OF(ROWS_X, b)) >= 1) &&
             (b < RING || FAULT == HIDDEN_RING_REUSED_EARLY || COUNT(r, OF(FC2, b - RING)) >= 1));
        if
        :: ok ->
            ACQUIRE(OF(ROWS_X, b), ROWS_WITHOUT_ACQUIRE);
            KNOWS_LOCAL(LOCAL_X(layer, b)); right(x_rows[KEPT(r, layer, b)] == TAG(layer, b));
            gate_up[KEPT(r, layer, b)] = TAG(layer, b); wrote_local(LOCAL_GATE_UP(layer, b));
            hidden_rows[RINGS(r, b)] = TAG(l, b); wrote_local(LOCAL_HIDDEN(b));
            RELEASE(OF(FC1, b), TILE_WITHOUT_RELEASE); COUNT(r, OF(FC1, b))++
        :: else -> skip
        fi
    :: kind == KIND_FC2 ->
        WAIT(COUNT(r, OF(FC1, b)) >= 1);
        if
        :: ok ->
            ACQUIRE(OF(FC1, b), FC1_WITHOUT_ACQUIRE);
            KNOWS_LOCAL(LOCAL_HIDDEN(b)); right(hidden_rows[RINGS(r, b)] == TAG(l, b));
            PUSH(slots, GLOBAL_SLOT);
            RELEASE(OF(FC2, b), TILE_WITHOUT_RELEASE); COUNT(r, OF(FC2, b))++;
            PUSHED
        :: else -> skip
        fi
    fi
}

inline run_backward_tile() {
    if
    :: kind == KIND_FC1 ->
        WAIT(FAULT == TILE_BEFORE_ROWS || COUNT(r, OF(ROWS_X, b)) >= 1);
        if
        :: ok ->
            ACQUIRE(OF(ROWS_X, b), ROWS_WITHOUT_ACQUIRE);
            KNOWS_LOCAL(LOCAL_X(layer, b)); right(x_rows[KEPT(r, layer, b)] == TAG(layer, b));
            gate_up[KEPT(r, layer, b)] = TAG(layer, b); wrote_local(LOCAL_GATE_UP(layer, b));
            RELEASE(OF(FC1, b), TILE_WITHOUT_RELEASE); COUNT(r, OF(FC1, b))++
        :: else -> skip
        fi
    :: kind == KIND_DHIDDEN ->
        WAIT((!AGAIN(m) || COUNT(r, OF(FC1, b)) >= 1) && COUNT(r, OF(ROWS_DY, b)) >= 1);
        if
        :: ok ->
            ACQUIRE(OF(ROWS_DY, b), ROWS_WITHOUT_ACQUIRE); ACQUIRE(OF(FC1, b), FC1_WITHOUT_ACQUIRE);
            KNOWS_LOCAL(LOCAL_DY(b)); right(dy_rows[RINGS(r, b)] == TAG(l, b));
            KNOWS_LOCAL(LOCAL_GATE_UP(layer, b)); right(gate_up[KEPT(r, layer, b)] == TAG(layer, b));
            dgate_up[RINGS(r, b)] = TAG(l, b); wrote_local(LOCAL_DGATE_UP(b));
            PUSH(dweight, GLOBAL_DWEIGHT);
            RELEASE(OF(DHIDDEN, b), TILE_WITHOUT_RELEASE); COUNT(r, OF(DHIDDEN, b))++;
            RELEASE(DHIDDEN_DONE, TILE_WITHOUT_RELEASE); COUNT(r, DHIDDEN_DONE)++;
            PUSHED
        :: else -> skip
        fi
    :: kind == KIND_DX ->
        WAIT(COUNT(r, OF(DHIDDEN, b)) >= 1);
        if
        :: ok ->
            ACQUIRE(OF(DHIDDEN, b), DHIDDEN_WITHOUT_ACQUIRE);
            KNOWS_LOCAL(LOCAL_DGATE_UP(b)); right(dgate_up[RINGS(r, b)] == TAG(l, b));
            PUSH(slots, GLOBAL_SLOT);
            PUSHED
        :: else -> skip
        fi
    :: kind == KIND_DWEIGHT ->
        WAIT(FAULT == DWEIGHT_BEFORE_DHIDDEN || COUNT(r, DHIDDEN_DONE) >= N - m * RING);
        if
        :: ok ->
            ACQUIRE(DHIDDEN_DONE, DHIDDEN_WITHOUT_ACQUIRE);
            for (b : m * RING .. m * RING + COUNT_OF(m) - 1) {
                KNOWS_LOCAL(LOCAL_DGATE_UP(b)); right(dgate_up[RINGS(r, b)] == TAG(l, b));
                KNOWS_LOCAL(LOCAL_DY(b)); right(dy_rows[RINGS(r, b)] == TAG(l, b));
                KNOWS_LOCAL(LOCAL_X(layer, b)); right(x_rows[KEPT(r, layer, b)] == TAG(layer, b))
            }
            if
            :: carry_in ->
                KNOWS_LOCAL(LOCAL_CARRY(CARRY(m + 1))); right(carry[r * 2 + CARRY(m + 1)] == TAG(l, m + 1))
            :: carry_out -> carry[r * 2 + CARRY(m)] = TAG(l, m); wrote_local(LOCAL_CARRY(CARRY(m)))
            :: else -> skip
            fi
        :: else -> skip
        fi
    fi;
    if
    :: ok -> RELEASE(TILES_DONE, TILE_WITHOUT_RELEASE); COUNT(r, TILES_DONE)++
    :: else -> skip
    fi
}

/* The flag of this epoch; its two bits are lost if a peer a launch ahead can overwrite them. */
#define DONE_AT(r, s) ((FAULT == ONE_DONE_FLAG -> 0 : (e % 2) * RANKS * RANKS) + AT(r, s))
#define DONE_OVERFLOWED 1
#define DONE_EVICTED 2
#define DONE_OTHER_STEP 3
#define DONE_HERE(p) (done_flag[DONE_AT(r, p)] >= 4 * (e - (FAULT == DONE_FLAG_OF_WRONG_EPOCH)))
#define DONE_DEADLINE (FAULT == DONE_WAIT_WITHOUT_DEADLINE -> false : (DEADLINE))

/* announce_done */
inline announce() {
    if
    :: !tell -> skip
    :: else ->
        DONE_TOGETHER {
            p = r;
            do :: EACH_DONE {
                GO_ON;
                if :: !tell -> break :: else -> skip fi;
                RELEASE_FLAG(DONE_FLAG(e, p, r), DONE_WITHOUT_RELEASE);
                done_flag[DONE_AT(p, r)] = 4 * e + (failed[r] -> (FAULT == FAILURE_NOT_TOLD -> 0 : failed[r])
                                                              : DONE_EVICTED * (FORWARD(l) && N > RING));
                p = NEXT(p);
                if :: p == r -> tell = false; p = 0 :: else -> skip fi
            } od
        }
    fi
}

/* With one CTA, when it takes a tile is nobody's concern. */
#if WORKERS == 1
#define TAKE_AND_RUN atomic
#else
#define TAKE_AND_RUN
#endif

proctype Compute(byte r; byte actor) {
    byte l, layer, p, e, b, m, t, kind;
    bool ok, tell, carry_in, carry_out;

    for (l : 1 .. LAUNCHES) {
        atomic {
            if :: running[r] == l -> skip :: over[r] && running[r] != l -> goto gone :: !ALIVE -> goto gone fi;
            layer = LAYER(l); e = epoch[r] + 1; ok = true;
            tell = actor == 2 && N == 0  /* there is nothing to wait for */
        }
        announce();

        /* ---- schedule_tiles .. signal_tiles */
        do
        :: TAKE_AND_RUN {
            atomic {
                GO_ON;
                d_step {
                    t = next_tile[r]; next_tile[r]++;
                    if :: FORWARD(l) -> forward_tile() :: else -> backward_tile() fi;
                    j = 0; k = 0; t = 0
                }
                if :: kind == NO_TILE -> break :: else -> skip fi
            }
            atomic {
                if :: FORWARD(l) -> run_forward_tile() :: else -> run_backward_tile() fi;
                kind = 0; b = 0; m = 0; carry_in = false; carry_out = false;
                if :: !ok -> goto stopped :: else -> skip fi
            }
            announce()
        }
        od;

        /* ---- await_done: */
        atomic {  /* all wait for the peers; one CTA looks at the bits ... */
            WAIT_ELSE(FAULT == NO_WAIT_FOR_DONE || EVERY(DONE_HERE), DONE_DEADLINE);
            if :: !ok || stop[r] -> goto stopped :: else -> skip fi;
            for (p : 0 .. RANKS - 1) {
                ACQUIRE_FLAG(DONE_FLAG(e, r, p), DONE_WITHOUT_ACQUIRE);
                k = done_flag[DONE_AT(r, p)] - 4 * e;
                if
                :: actor == 2 && k == DONE_OVERFLOWED && p != r -> error[r] = PEER_FAILED
                :: actor == 2 && k == DONE_OTHER_STEP && p != r -> error[r] = OTHER_STEP
                :: actor == 2 && k == DONE_EVICTED -> dispatch_again[OFLAYER(r, layer)] = true
                :: else -> skip
                fi
            }
            /* ... and finish: every row of this rank's tokens, from wherever it was computed. */
            for (p : 0 .. RANKS - 1) {
                if
                :: SENDS(r, p, layer) && blocks[OFLAYER(p, layer)] > 0 ->
                    for (b : 0 .. blocks[OFLAYER(p, layer)] - 1) {
                        KNOWS(GLOBAL_SLOT(r, p, b)); right(slots[SLOT(r, p, b)] == l);
                        if
                        :: !FORWARD(l) -> KNOWS(GLOBAL_DWEIGHT(r, p, b)); right(dweight[SLOT(r, p, b)] == l)
                        :: else -> skip
                        fi
                    }
                :: else -> skip
                fi
            }
            k = 0;
stopped:
            GO_ON;
            leave(); tell = false; carry_in = false; carry_out = false
        }
    }
gone:
    atomic {
        l = 0; layer = 0; p = 0; e = 0; b = 0; m = 0; kind = 0;
        ok = false; tell = false; carry_in = false; carry_out = false
    }
}
