// The C interface of the kernel library: what a binding needs to know, and nothing of CUDA C++.
//
// All pointers are device pointers unless a comment says otherwise. All tensors are contiguous, rows last to
// first dimension as written. Every call only enqueues work on `stream`; none waits for the device.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOK_API_VERSION 2

// Rows of a tile; segments of the schedule are padded to it. It is part of the numerics: sums over rows run tile by tile.
#define MOK_TILE_ROWS 128

// What every rank of an expert-parallel group has agreed on. Buffers are laid out from it.
typedef struct MokShape {
  int32_t ranks;                // EP
  int32_t rank;                 // this one
  int32_t max_tokens;           // largest T of any rank that the buffers can take
  int32_t hidden;               // H, a multiple of 64
  int32_t intermediate;         // I, a multiple of 64
  int32_t shared_intermediate;  // Is, a multiple of 64; 0 = no shared expert
  int32_t experts_local;        // E_local
  int32_t topk;                 // K, 1 to 32
  int32_t capacity_rows;        // rows that a schedule can hold, a multiple of 128
  int32_t ring_rows;            // rows of a macrobatch, a multiple of minibatch_rows
  int32_t minibatch_rows;       // a multiple of 128
  int32_t format;               // MokFormat of the routed experts' operands
} MokShape;

typedef enum MokFormat {
  MOK_FORMAT_BF16 = 0,
  // E4M3 with fp32 scales that are powers of two, one for 1x128 values of a row, 128x128 of a weight. H and I are
  // multiples of 128. Weight gradients have bf16 operands, and the shared expert is bf16.
  MOK_FORMAT_FP8_BLOCK = 1,
  // MXFP8, dispatched as such and expanded to bf16, exactly, for bf16 products. Weight gradients have bf16 operands, and
  // the shared expert is bf16.
  MOK_FORMAT_MXFP8 = 2,
  MOK_FORMAT_MXFP8_E5M2 = 3,  // likewise, with gradients (dY, d(gate, up)) in E5M2
} MokFormat;

// Written once, by the first thread that gives up. Lives in pinned host memory, zeroed by the host.
typedef struct MokError {
  int32_t code;       // MokErrorCode; 0 = none
  int32_t flag;       // MokFlag that was waited for
  int32_t rank;       // who recorded it
  int32_t peer;       // whose flag it is; -1 = this rank's own
  int32_t index;      // block of rows, for flags of which there are many
  uint32_t expected;  // value waited for, or the limit
  uint32_t seen;      // last value read, or the demand
  uint32_t epoch;     // number of the launch in this workspace
} MokError;

typedef enum MokErrorCode {
  MOK_OK = 0,
  MOK_TIMEOUT = 1,         // a wait passed the deadline
  MOK_OVERFLOW = 2,        // more routed rows (seen) than the schedule's capacity (expected)
  MOK_SHAPE_MISMATCH = 3,  // a peer launched with another shape or kind of step (seen, if it is known)
  MOK_PEER_FAILED = 4,     // a peer recorded an overflow: its rows never came
  MOK_BAD_ROUTE = 5,       // topk_ids[index] is `seen`, which is no expert (there are `expected`) and not -1
} MokErrorCode;

typedef enum MokFlag {
  MOK_FLAG_NONE = 0,
  MOK_FLAG_ROUTES = 1,       // a peer's topk_ids
  MOK_FLAG_INPUT = 2,        // a peer's x or dY
  MOK_FLAG_DONE = 3,         // a peer has pushed all rows of this rank
  MOK_FLAG_ROWS = 4,         // rows of a block pulled
  MOK_FLAG_FC1 = 5,          // FC1 tiles of a block
  MOK_FLAG_FC2 = 6,          // FC2 tiles of a block
  MOK_FLAG_DHIDDEN = 7,      // dHidden tiles
  MOK_FLAG_MACROBATCH = 8,   // all tiles of the macrobatches before
  MOK_FLAG_PREPARE = 9,      // the other CTAs of the prepare kernel
  MOK_FLAG_PIPELINE = 10,    // a barrier inside a CTA
} MokFlag;

// When a compute CTA handled a tile, in nanoseconds of the device's clock. `kind` 0 = no such tile.
typedef struct MokTraceTile {
  int32_t kind;         // 1 FC1, 2 FC2, 3 dHidden, 4 dX, 5 dW1, 6 dW2, 7 the sum over k
  int32_t block;        // of 128 rows
  int32_t column;       // first column
  int32_t sm;
  uint64_t waiting;     // ready for a tile
  uint64_t started;     // the tile and its inputs are there
  uint64_t multiplied;  // the product is done
  uint64_t stored;      // outputs are stored
} MokTraceTile;

typedef struct MokWorkspace {
  MokShape shape;
  void* const* peers;  // [ranks]: the symmetric heap of every rank, as mapped on this device
  void* scratch;       // mok_scratch_bytes() of local memory, zeroed once by the host
  MokError* error;     // pinned host memory
  int64_t timeout_ns;
  int32_t num_ctas;    // CTAs of a launch, all resident together
  int32_t forward_comm_ctas;   // of these, how many only move tokens; 0 = idle warps of all CTAs do
  int32_t backward_comm_ctas;
  MokTraceTile* trace;         // [num_ctas, trace_tiles] or null: when each CTA did what
  int32_t trace_tiles;         // tiles of a CTA that are recorded
} MokWorkspace;

// Who computes which row: sorted by (local expert, source rank, token, k). Written by mok_forward, read by mok_backward.
typedef struct MokSchedule {
  int32_t* row_source;      // [capacity_rows]: source_rank * (max T * K) + t * K + k; -1 = padding
  float* row_weight;        // [capacity_rows]: router weight of the row; 0 in padding
  int32_t* block_expert;    // [capacity_rows / 128]: local expert of each block of rows
  int32_t* expert_offsets;  // [experts_local + 1]: first row of each segment; last = rows in use
  int32_t* expert_rows;     // [experts_local]: rows without padding
  int32_t* info;            // [3]: rows in use (padding included), max T over the ranks, x is needed again
} MokSchedule;

// Expert weights in E4M3 with one fp32 scale for 128 x 128 values, both ways round. Null in bf16. In MXFP8 w1 and w2 are
// the bf16 numbers that MXFP8 has, with blocks along a row; w1_t and w2_t, with blocks along a column, lie like them,
// [E_local, 2I, H] and [E_local, H, I]; and there are no scales.
typedef struct MokScaledWeights {
  const void* w1;            // [E_local, 2I, H]
  const float* w1_scale;     // [E_local, 2I / 128, H / 128]
  const void* w2;            // [E_local, H, I]
  const float* w2_scale;     // [E_local, H / 128, I / 128]
  const void* w1_t;          // [E_local, H, 2I]; this and what follows is read by the backward only
  const float* w1_t_scale;   // [E_local, H / 128, 2I / 128]
  const void* w2_t;          // [E_local, I, H]
  const float* w2_t_scale;   // [E_local, I / 128, H / 128]
} MokScaledWeights;

typedef struct MokForward {
  int32_t tokens;               // T
  const void* x;                // [T, H] bf16
  const int32_t* topk_ids;      // [T, K]
  const float* topk_weights;    // [T, K]
  const void* w1;               // [E_local, 2I, H] bf16: gate rows, then up rows
  const void* w2;               // [E_local, H, I] bf16
  const void* shared_w1;        // [2Is, H] bf16
  const void* shared_w2;        // [H, Is] bf16
  const float* shared_scale;    // [T] or null: factor of the shared expert's output
  void* y;                      // [T, H] bf16, out
  void* x_rows;                 // [ring_rows, mok_row_bytes()], out: dispatched rows of the last macrobatch
  void* gate_up;                // [ring_rows, 2I] bf16, out: FC1 output of the last macrobatch
  void* shared_gate_up;         // [T, 2Is] bf16, out
  MokScaledWeights scaled;      // where the format is not bf16; w1 and w2 are not read then
} MokForward;

typedef enum MokGradDtype { MOK_GRAD_BF16 = 0, MOK_GRAD_FP32 = 1 } MokGradDtype;

typedef struct MokGrad {
  void* data;          // shape of the weight
  int32_t dtype;       // MokGradDtype
  int32_t accumulate;  // 1 = add to what is there, 0 = overwrite
} MokGrad;

typedef struct MokBackward {
  int32_t tokens;
  const void* dy;               // [T, H] bf16
  const void* x;                // [T, H] bf16, as in the forward
  const int32_t* topk_ids;      // [T, K]
  const void* w1;
  const void* w2;
  const void* shared_w1;
  const void* shared_w2;
  const float* shared_scale;    // [T] or null
  void* x_rows;                 // [ring_rows, mok_row_bytes()] as the forward left it; overwritten where rows were evicted
  void* gate_up;                // [ring_rows, 2I], likewise
  const void* shared_gate_up;   // [T, 2Is]
  void* dx;                     // [T, H] bf16, out
  float* dtopk_weights;         // [T, K], out
  float* dshared_scale;         // [T], out, or null
  MokGrad dw1, dw2, dshared_w1, dshared_w2;
  MokScaledWeights scaled;      // as in the forward
} MokBackward;

// Bytes of the two buffers of a workspace. The symmetric heap must be zeroed before any rank's first launch.
size_t mok_symmetric_bytes(const MokShape* shape);
size_t mok_scratch_bytes(const MokShape* shape);
// Bytes of a row of x_rows: 2 * H in bf16 and MXFP8; with block scales H values, H / 128 scales in fp32, up to a
// multiple of 16.
size_t mok_row_bytes(const MokShape* shape);

// Each direction is two launches: `prepare` (exchange of routes and schedule, or staging of dY), then the
// megakernel. With several ranks on one device, enqueue every rank's prepare before any rank's main launch.
// Return 0, or an error of CUDA whose text mok_last_error() gives.
int mok_forward_prepare(const MokWorkspace*, const MokSchedule*, const MokForward*, void* stream);
int mok_forward(const MokWorkspace*, const MokSchedule*, const MokForward*, void* stream);
int mok_backward_prepare(const MokWorkspace*, const MokSchedule*, const MokBackward*, void* stream);
int mok_backward(const MokWorkspace*, const MokSchedule*, const MokBackward*, void* stream);

const char* mok_last_error(void);  // of the calling thread
int mok_api_version(void);
size_t mok_struct_bytes(const char* name);  // sizeof of a struct above by name, 0 if unknown: a binding's check

#ifdef __cplusplus
}
#endif
