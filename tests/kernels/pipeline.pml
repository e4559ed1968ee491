/* The roles of one compute CTA on Blackwell and the barriers between them: kernels/megakernel.cuh, mma/sm100.cuh.
 *
 * A barrier is what mbarrier is: a phase bit, and arrivals pending; a wait for a parity ends when the phase of that parity
 * is complete, so a role that falls two phases behind is caught. The tensor cores take instructions in order and finish
 * them later. Data are tags: the tile (from 1) that was written last. FAULT n leaves one thing out. */

#ifndef FAULT
#define FAULT 0
#endif
#define TILES 3
#define SLOTS 3
#define STAGES 1
#define ACCUMULATORS 2
#define WARPS 2   /* that store */

typedef Barrier { bit phase; byte pending; byte count };

/* Barriers by number. */
#define TILE_FULL 0
#define TILE_DONE (TILE_FULL + SLOTS)
#define TILE_EMPTY (TILE_DONE + SLOTS)
#define FULL (TILE_EMPTY + SLOTS)
#define EMPTY (FULL + STAGES)
#define MULTIPLIED (EMPTY + STAGES)
#define DRAINED (MULTIPLIED + ACCUMULATORS)
#define RESTORED (DRAINED + ACCUMULATORS)
#define CLAIM (RESTORED + 1)
#define BARRIERS (CLAIM + 1)
Barrier bar[BARRIERS];

inline init_barrier(b, arrivals) { bar[b].count = arrivals; bar[b].pending = arrivals }
inline arrive(b) {
  bar[b].pending--;
  if
  :: bar[b].pending == 0 -> bar[b].phase = 1 - bar[b].phase; bar[b].pending = bar[b].count
  :: else
  fi
}
#define COMPLETE(b, parity) (bar[b].phase != (parity))

byte k_of[TILES + 1], carried[TILES + 1];  /* stages of a tile, 0 to 2; whether its accumulators are put back first */
byte slot[SLOTS];                          /* the tile that the scheduler wrote; TILES + 1 = end */
byte stage[STAGES];                        /* the tile that operands belong to; 0 = free */
/* The part of an accumulator that a warp stores, by accumulator * WARPS + warp. */
#define PARTS (ACCUMULATORS * WARPS)
byte part[PARTS];   /* the tile that it is of */
byte sums[PARTS];   /* stages summed in it; 10 more where it was put back */
bool unread[PARTS]; /* not yet in the warp's registers */

/* Instructions to the tensor cores: multiply(stage, accumulator, tile, first) or arrive(barrier). */
mtype = { multiply, commit };
chan tensor = [8] of { mtype, byte, byte, byte, byte };

proctype Scheduler() {
  byte n = 0, s;
  do
  :: s = n % SLOTS;
     if
     :: n > 0 -> COMPLETE(CLAIM, (n - 1) % 2)
     :: else
     fi;
     atomic { COMPLETE(TILE_EMPTY + s, 1 - n / SLOTS % 2) -> slot[s] = n + 1; arrive(TILE_FULL + s) };
     if
     :: n == TILES -> break
     :: else -> n++
     fi
  od
}

proctype Loader() {
  byte n = 0, s, t, k, at = 0, turn = 0;
  do
  :: atomic { COMPLETE(TILE_FULL + n % SLOTS, n / SLOTS % 2) -> s = n % SLOTS; t = slot[s]; assert(t == n + 1) };
     if
     :: t > TILES -> break
     :: else
     fi;
     atomic { arrive(CLAIM) };
     k = 0;
     do
     :: k < k_of[t] ->
        atomic { COMPLETE(EMPTY + at, 1 - turn) -> assert(stage[at] == 0); stage[at] = t; arrive(FULL + at);
          at++; k++;
          if
          :: at == STAGES -> at = 0; turn = 1 - turn
          :: else
          fi }
     :: else -> break
     od;
     n++
  od
}

proctype Issuer() {
  byte n = 0, s, t, k, at = 0, turn = 0, a = 0, a_turn = 0, r_turn = 0;
  do
  :: atomic { COMPLETE(TILE_FULL + n % SLOTS, n / SLOTS % 2) -> s = n % SLOTS; t = slot[s]; assert(t == n + 1) };
     if
     :: t > TILES -> break
     :: else
     fi;
     if
     :: FAULT != 1 -> atomic { arrive(TILE_EMPTY + s) }
     :: else
     fi;
     if
     :: k_of[t] > 0 ->
        if
        :: FAULT != 2 -> COMPLETE(DRAINED + a, 1 - a_turn)
        :: else
        fi;
        if
        :: carried[t] && FAULT != 3 -> COMPLETE(RESTORED, r_turn); r_turn = 1 - r_turn
        :: else
        fi;
        k = 0;
        do
        :: k < k_of[t] ->
           atomic { COMPLETE(FULL + at, turn) -> assert(stage[at] == t);
             tensor ! multiply, at, a, t, (k == 0 && !carried[t]);
             if
             :: FAULT != 4 -> tensor ! commit, EMPTY + at, 0, 0, 0
             :: else -> stage[at] = 0; arrive(EMPTY + at)  /* at once, not when it has been read */
             fi;
             at++; k++;
             if
             :: at == STAGES -> at = 0; turn = 1 - turn
             :: else
             fi }
        :: else -> break
        od;
        tensor ! commit, MULTIPLIED + a, 0, 0, 0;
        a++;
        if
        :: a == ACCUMULATORS -> a = 0; a_turn = 1 - a_turn
        :: else
        fi
     :: else
     fi;
     n++
  od
}

proctype TensorCores() {
  mtype what; byte x, a, t, first, w;
end:
  do
  :: atomic { tensor ? what, x, a, t, first ->
       if
       :: what == multiply ->
          assert(stage[x] == t);
          w = 0;
          do
          :: w < WARPS ->
             if
             :: first -> assert(!unread[a * WARPS + w]); part[a * WARPS + w] = t; sums[a * WARPS + w] = 0
             :: else -> assert(part[a * WARPS + w] == t)
             fi;
             unread[a * WARPS + w] = true;
             sums[a * WARPS + w]++;
             w++
          :: else -> break
          od
       :: what == commit ->
          if
          :: x >= EMPTY && x < EMPTY + STAGES -> stage[x - EMPTY] = 0
          :: else
          fi;
          arrive(x)
       fi }
  od
}

proctype Warp(byte w) {
  byte n = 0, s, t, a = 0, a_turn = 0;
  do
  :: atomic { COMPLETE(TILE_FULL + n % SLOTS, n / SLOTS % 2) -> s = n % SLOTS; t = slot[s]; assert(t == n + 1) };
     if
     :: t > TILES -> break
     :: else
     fi;
     if
     :: k_of[t] > 0 ->
        if
        :: carried[t] -> atomic {
             assert(!unread[a * WARPS + w]);
             part[a * WARPS + w] = t; sums[a * WARPS + w] = 10; arrive(RESTORED) }
        :: else
        fi;
        atomic { COMPLETE(MULTIPLIED + a, a_turn) ->
          assert(part[a * WARPS + w] == t && sums[a * WARPS + w] == k_of[t] + 10 * carried[t]);
          unread[a * WARPS + w] = false;
          arrive(DRAINED + a);
          a++;
          if
          :: a == ACCUMULATORS -> a = 0; a_turn = 1 - a_turn
          :: else
          fi }
     :: else
     fi;
     atomic { arrive(TILE_DONE + s); n++ }
  od
}

proctype Signaller() {
  byte n = 0, s, t;
  do
  :: atomic { COMPLETE(TILE_FULL + n % SLOTS, n / SLOTS % 2) -> s = n % SLOTS; t = slot[s]; assert(t == n + 1) };
     if
     :: t > TILES -> break
     :: else
     fi;
     atomic { COMPLETE(TILE_DONE + s, n / SLOTS % 2) -> arrive(TILE_EMPTY + s); n++ }
  od
}

init {
  byte i = 0;
  atomic {
    do
    :: i < SLOTS ->
       init_barrier(TILE_FULL + i, 1);
       init_barrier(TILE_DONE + i, WARPS);
       init_barrier(TILE_EMPTY + i, (FAULT == 1 -> 1 : 2));
       i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < STAGES -> init_barrier(FULL + i, 1); init_barrier(EMPTY + i, 1); i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < ACCUMULATORS -> init_barrier(MULTIPLIED + i, 1); init_barrier(DRAINED + i, (FAULT == 5 -> 1 : WARPS)); i++
    :: else -> break
    od;
    init_barrier(RESTORED, (FAULT == 6 -> 1 : WARPS));
    init_barrier(CLAIM, 1);
    i = 1;
    do  /* every list of such tiles */
    :: i <= TILES ->
       if
       :: i == 1 -> k_of[i] = 0
       :: k_of[i] = 1
       :: k_of[i] = 2; carried[i] = 1
       fi;
       i++
    :: else -> break
    od;
    run Scheduler(); run Loader(); run Issuer(); run TensorCores(); run Signaller();
    i = 0;
    do
    :: i < WARPS -> run Warp(i); i++
    :: else -> break
    od
  }
}
