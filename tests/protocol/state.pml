/* State of the ranks, and the words in which protocol.pml is written.
 *
 * Bounds, given with -D: RANKS 2 or 3; BLOCKS, the most blocks (= minibatches) that a rank computes; RING, blocks of a
 * macrobatch; WORKERS, compute CTAs of rank 0 (the others have one); LAUNCHES and ORDER_OF_LAUNCHES. README.md has the
 * scenarios.
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef RING
#define RING 1
#endif
#ifndef WORKERS
#define WORKERS 1
#endif
#define WORKERS_OF(r) ((r) == 0 -> WORKERS : 1)
#ifdef SEEDED  /* the fault is the number in the environment variable FAULT */
byte seeded;
#define FAULT seeded
#else
#define FAULT 0
#endif

/* Launches: 0 = forward, backward, forward of the next layer, its backward.
 *           1 = as a pipeline does it: forwards of layers 1 and 0, then backwards of 1 and 0. */
#ifndef LAUNCHES
#define LAUNCHES 3
#endif
#if ORDER_OF_LAUNCHES == 1
#define FORWARD(l) (l <= 2)
#define LAYER(l) (l % 2)
#else
#define FORWARD(l) (l % 2 == 1)
#define LAYER(l) ((l - 1) / 2)
#endif
#define LAYERS 2
#ifdef DIFFERS  /* rank 0 makes the launches of a pipeline, the others do not: from launch 2 on, they do not fit */
#undef FORWARD
#undef LAYER
#define FORWARD(l) (r == 0 -> l <= 2 : l % 2 == 1)
#define LAYER(l) (r == 0 -> (l == 2 || l == 3) : (l - 1) / 2)
#define right(condition) assert(l >= 2 || (condition))
#else
#define right(condition) assert(condition)
#endif

/* ---- seeded faults: each leaves out, or does wrongly, one thing that the kernels do */
#define PULL_BEFORE_INPUT_FLAG 1
#define INPUT_FLAG_OF_WRONG_EPOCH 2
#define ROUTES_FLAG_OF_WRONG_EPOCH 3
#define DONE_FLAG_OF_WRONG_EPOCH 4
#define NO_WAIT_FOR_DONE 5
#define DONE_BY_FIRST_TILE 6
#define COUNTERS_NOT_CLEARED 7
#define TILE_BEFORE_ROWS 8
#define X_RING_REUSED_EARLY 9
#define HIDDEN_RING_REUSED_EARLY 10
#define BACKWARD_RING_REUSED_EARLY 11
#define DWEIGHT_BEFORE_DHIDDEN 12
#define ONE_CARRY_BUFFER 13
#define ONE_DONE_FLAG 14
#define ACTIVE_AFTER_STOP 15
#define LAG_IN_SHORT_RING 16
#define DONE_WAIT_WITHOUT_DEADLINE 17
#define STOP_NOT_SEEN 18
#define FAILURE_NOT_TOLD 19
#define X_NOT_STAGED_AGAIN 20
#define ROWS_COUNTED_AFTER_STOP 21
#define BACKWARD_NOT_ANNOUNCED 22
#define OTHER_STEP_NOT_TOLD 23
/* of memory order; they need ORDERED */
#define ROUTES_WITHOUT_ACQUIRE 30
#define INPUT_WITHOUT_ACQUIRE 31
#define DONE_WITHOUT_ACQUIRE 32
#define ROWS_WITHOUT_ACQUIRE 33
#define FC1_WITHOUT_ACQUIRE 34
#define DHIDDEN_WITHOUT_ACQUIRE 35
#define PUSHED_WITHOUT_ACQUIRE 36
#define ROUTES_WITHOUT_RELEASE 37
#define INPUT_WITHOUT_RELEASE 38
#define DONE_WITHOUT_RELEASE 39
#define ROWS_WITHOUT_RELEASE 40
#define TILE_WITHOUT_RELEASE 41
#define PUSHED_WITHOUT_RELEASE 42
#define MACROBATCH_WITHOUT_ACQUIRE 43

/* ---- memory. A datum holds a tag of what was written there last: the number of the launch, and the block if it is a
 * ring. Readers check the tag. [x * n + y] stands for [x][y]. */
#define AT(x, y) ((x) * RANKS + (y))
#define RINGS(r, b) ((r) * RING + (b) % RING)
#define KEPT(r, layer, b) (((r) * LAYERS + (layer)) * RING + (b) % RING)
#define TAG(number, b) ((number) * BLOCKS + (b) + 1)

/* symmetric heap of each rank; the second index is the rank that writes */
byte routes_flag[RANKS * RANKS];
byte input_flag[RANKS * RANKS];
byte done_flag[2 * RANKS * RANKS];
byte ids[RANKS * RANKS];
byte announced[RANKS * RANKS]; /* 2 * launch + forward */
byte input[RANKS];
byte input_again[RANKS];
#define SLOT(owner, by, b) (((owner) * RANKS + (by)) * BLOCKS + (b))
byte slots[RANKS * RANKS * BLOCKS];
byte dweight[RANKS * RANKS * BLOCKS];

/* local memory */
byte x_rows[RANKS * LAYERS * RING];
byte gate_up[RANKS * LAYERS * RING];
byte hidden_rows[RANKS * RING];
byte dy_rows[RANKS * RING];
byte dgate_up[RANKS * RING];
byte carry[RANKS * 2];
byte epoch[RANKS];
bool stop[RANKS];

/* counters of a launch */
#define ROWS_X 0
#define ROWS_DY 1
#define FC1 2
#define FC2 3
#define DHIDDEN 4
#define TILES_DONE (5 * BLOCKS)
#define DHIDDEN_DONE (5 * BLOCKS + 1)
#define TILES_PUSHED (5 * BLOCKS + 2)
#define COUNTERS (5 * BLOCKS + 3)
#define OF(c, b) ((c) * BLOCKS + (b))
#define COUNT(r, c) counters[(r) * COUNTERS + (c)]
byte counters[RANKS * COUNTERS];
byte next_tile[RANKS];
byte failed[RANKS];  /* 0, or what the done flag will say of it */

/* schedules, by rank and layer */
#define OFLAYER(r, layer) ((r) * LAYERS + (layer))
byte blocks[RANKS * LAYERS];      /* in use */
byte sources[RANKS * LAYERS];     /* bit s: every block holds a row of rank s */
bool dispatch_again[RANKS * LAYERS]; /* info[2]: some rank will ask for x again */
#define SENDS(s, r, layer) ((sources[OFLAYER(r, layer)] >> (s)) & 1)
#define N blocks[OFLAYER(r, layer)]
#define MACROBATCHES (N == 0 -> 1 : (N + RING - 1) / RING)

/* frame: which launch each rank's megakernel is in, how many of its roles have left, and what was recorded */
byte running[RANKS];
byte left[RANKS];
byte exited[RANKS];
bool over[RANKS];
#define TIMED_OUT 1
#define OVERFLOWED 2
#define PEER_FAILED 3
#define OTHER_STEP 4
byte error[RANKS];
byte overflowed_in[RANKS]; /* launch; the truth, for the properties only */

hidden byte i, j, k;  /* within one step only */

/* ---- scenarios */
#ifdef DEAD
bool dead;
#define ALIVE (r != DEAD || !dead)
#else
#define ALIVE true
#endif
/* A deadline passes when nothing else can happen any more; that of an impatient rank also at any moment. */
#if defined(IMPATIENT)
#define DEADLINE (timeout || r == IMPATIENT)
#elif defined(DEAD)
#define DEADLINE timeout
#else
#define DEADLINE false
#endif

/* Steps
 *
 * What a role does without waiting for others is one step, where that hides nothing: conditions that are waited for
 * stay true, so a role that is late stands for one that saw them early and acts late; and a flag that is sent earlier
 * than need be to one peer is a flag that this peer looks at later. Where a rank may die or give up between the two,
 * sends to different peers are steps of their own. */
#if (defined(DEAD) || defined(IMPATIENT)) && RANKS == 2
#define TOGETHER
#define EACH atomic
#else
#define TOGETHER atomic
#define EACH
#endif
/* With three ranks, of the done flags alone: what one peer hears, the other does not. */
#if defined(DEAD) || defined(IMPATIENT)
#define DONE_TOGETHER
#define EACH_DONE atomic
#else
#define DONE_TOGETHER atomic
#define EACH_DONE
#endif
#define NEXT(p) ((p) + 1) % RANKS
#define GO_ON if :: ALIVE -> skip :: else -> goto gone fi
/* A role leaves the launch. */
inline leave() {
    left[r]++;
    if :: !stop[r] -> exited[r]++ :: else -> skip fi;
    layer = 0; e = 0; p = 0; b = 0; m = 0; kind = 0; ok = false
}
/* A condition on every rank p. */
#if RANKS == 2
#define EVERY(condition) (condition(0) && condition(1))
#else
#define EVERY(condition) (condition(0) && condition(1) && condition(2))
#endif

/* Waiter: true when the condition holds; false when this rank has stopped, or stops now, or is dead. */
#define WAIT_ELSE(condition, deadline) \
    if \
    :: (condition) && ALIVE -> ok = true \
    :: !(condition) && ALIVE && stop[r] && FAULT != STOP_NOT_SEEN -> ok = false \
    :: !(condition) && ALIVE && !stop[r] && (deadline) -> stop[r] = true; error[r] = TIMED_OUT; ok = false \
    :: !ALIVE -> ok = false \
    fi
#define WAIT(condition) WAIT_ELSE(condition, DEADLINE)

/* ---- memory order
 *
 * With ORDERED, each actor (stream, pulling warp, compute CTA) and each flag knows which data it has the latest write
 * of, one bit a datum. A write is known to its author alone; a release adds the author's knowledge to the flag, an
 * acquire adds the flag's to the reader; a read needs the bit. This is the causality order of the PTX memory model
 * for data written by one actor at a time, with all scopes wide enough. */
#ifdef ORDERED
#define ACTORS (2 + WORKERS)
#define GLOBAL_IDS(r, s) (1 << AT(r, s))  /* and what is announced */
#define GLOBAL_INPUT(r) (1 << (RANKS * RANKS + (r)))
#define GLOBAL_AGAIN(r) (1 << (RANKS * RANKS + RANKS + (r)))
#define GLOBAL_SLOT(r, s, b) (1 << (RANKS * RANKS + 2 * RANKS + SLOT(r, s, b)))
#define GLOBAL_DWEIGHT(r, s, b) (1 << (RANKS * RANKS + 2 * RANKS + RANKS * RANKS * BLOCKS + SLOT(r, s, b)))
#define LOCAL_X(layer, b) (1 << ((layer) * RING + (b) % RING))
#define LOCAL_GATE_UP(layer, b) (1 << ((2 + (layer)) * RING + (b) % RING))
#define LOCAL_HIDDEN(b) (1 << (4 * RING + (b) % RING))
#define LOCAL_DY(b) (1 << (5 * RING + (b) % RING))
#define LOCAL_DGATE_UP(b) (1 << (6 * RING + (b) % RING))
#define LOCAL_CARRY(n) (1 << (7 * RING + (n)))
int knows[RANKS * ACTORS];           /* data of the symmetric heaps */
int knows_local[RANKS * ACTORS];     /* of the rank's own memory */
int flag_knows[4 * RANKS * RANKS];   /* routes, input, done, done */
int counter_knows[RANKS * COUNTERS];
int counter_knows_local[RANKS * COUNTERS];
#define ME (r * ACTORS + actor)
#define ROUTES_FLAG(r, s) AT(r, s)
#define INPUT_FLAG(r, s) (RANKS * RANKS + AT(r, s))
#define DONE_FLAG(e, r, s) ((2 + (e) % 2) * RANKS * RANKS + AT(r, s))

inline wrote(datum) {
    d_step {
        for (i : 0 .. RANKS * ACTORS - 1) { knows[i] = knows[i] & ~(datum) }
        for (i : 0 .. 4 * RANKS * RANKS - 1) { flag_knows[i] = flag_knows[i] & ~(datum) }
        for (i : 0 .. RANKS * COUNTERS - 1) { counter_knows[i] = counter_knows[i] & ~(datum) }
        knows[ME] = knows[ME] | (datum); i = 0
    }
}
inline wrote_local(datum) {
    d_step {
        for (i : 0 .. ACTORS - 1) { knows_local[r * ACTORS + i] = knows_local[r * ACTORS + i] & ~(datum) }
        for (i : 0 .. COUNTERS - 1) {
            counter_knows_local[r * COUNTERS + i] = counter_knows_local[r * COUNTERS + i] & ~(datum)
        }
        knows_local[ME] = knows_local[ME] | (datum); i = 0
    }
}
#define KNOWS(datum) assert((knows[ME] & (datum)) != 0)
#define KNOWS_LOCAL(datum) assert((knows_local[ME] & (datum)) != 0)
#define RELEASE_FLAG(f, fault) flag_knows[f] = (FAULT == fault -> 0 : knows[ME])
#define ACQUIRE_FLAG(f, fault) knows[ME] = knows[ME] | (FAULT == fault -> 0 : flag_knows[f])
#define RELEASE(c, fault) \
    counter_knows[r * COUNTERS + (c)] = counter_knows[r * COUNTERS + (c)] | (FAULT == fault -> 0 : knows[ME]); \
    counter_knows_local[r * COUNTERS + (c)] = \
        counter_knows_local[r * COUNTERS + (c)] | (FAULT == fault -> 0 : knows_local[ME])
#define ACQUIRE(c, fault) \
    knows[ME] = knows[ME] | (FAULT == fault -> 0 : counter_knows[r * COUNTERS + (c)]); \
    knows_local[ME] = knows_local[ME] | (FAULT == fault -> 0 : counter_knows_local[r * COUNTERS + (c)])
/* The end of a kernel and the start of the next one in the stream order everything of a rank. */
inline kernel_boundary() {
    d_step {
        for (i : 0 .. ACTORS - 1) {
            knows[r * ACTORS] = knows[r * ACTORS] | knows[r * ACTORS + i];
            knows_local[r * ACTORS] = knows_local[r * ACTORS] | knows_local[r * ACTORS + i]
        }
        for (i : 1 .. ACTORS - 1) {
            knows[r * ACTORS + i] = knows[r * ACTORS];
            knows_local[r * ACTORS + i] = knows_local[r * ACTORS]
        }
        i = 0
    }
}
#else
#define wrote(datum) skip
#define wrote_local(datum) skip
#define KNOWS(datum) skip
#define KNOWS_LOCAL(datum) skip
#define RELEASE_FLAG(f, fault) skip
#define ACQUIRE_FLAG(f, fault) skip
#define RELEASE(c, fault) skip
#define ACQUIRE(c, fault) skip
#define kernel_boundary() skip
#endif
