// Host functions that say where Blackwell's tile products expect things, from CUTLASS's own layouts and copy traits.
// test_layouts.py compares them with what the copy engine writes and with what the epilogues assume. Every function
// fills a whole array: `format` is 0 for bf16 and 1 for MXFP8, a major 0 for K and 1 for MN.
#include <cstdio>
#include <cstring>
#include <cuda_runtime.h>
#include "mma/sm100_mxfp8.cuh"
#include "mma/sm100_pair.cuh"

// The driver's encoder of tensor maps, which the host code looks up, notes what it is asked for.
static CUresult note_map(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*, cuuint64_t const*,
                         cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave, CUtensorMapSwizzle,
                         CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static cudaError_t find_note_map(char const*, void** found, unsigned, int, cudaDriverEntryPointQueryResult* result) {
  *found = reinterpret_cast<void*>(&note_map);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
#define cudaGetDriverEntryPointByVersion find_note_map
#include "host/tensor_maps.cu"
#undef cudaGetDriverEntryPointByVersion

using namespace mok;
using namespace cute;

int mok::fail(char const*, ...) { return 1; }

static uint64_t noted[16];
static CUresult note_map(CUtensorMap*, CUtensorMapDataType type, cuuint32_t rank, void*, cuuint64_t const* dims,
                         cuuint64_t const* strides, cuuint32_t const* box, cuuint32_t const* steps,
                         CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank != 4) return CUDA_ERROR_INVALID_VALUE;
  for (int i = 0; i < 4; ++i) noted[i] = dims[i], noted[7 + i] = box[i];
  for (int i = 0; i < 3; ++i) noted[4 + i] = strides[i];
  noted[11] = steps[0] * steps[1] * steps[2] * steps[3], noted[12] = type, noted[13] = swizzle;
  return CUDA_SUCCESS;
}

namespace {

template <class F>
auto with_majors(int a, int b, F f) {
  if (a) return f(C<Major::MN>{}, C<Major::MN>{});
  return b ? f(C<Major::K>{}, C<Major::MN>{}) : f(C<Major::K>{}, C<Major::K>{});
}

// Byte of each element [extent, k, stage] of an operand's ring of stages.
template <class Layout, class T>
void elements(Layout, T*, int32_t* out) {
  auto t = make_tensor(make_smem_ptr(static_cast<T*>(nullptr)), Layout{});
  for (int mn = 0; mn < size<0>(t); ++mn)
    for (int k = 0; k < size<1>(t); ++k)
      for (int stage = 0; stage < size<2>(t); ++stage)
        *out++ = int32_t(reinterpret_cast<intptr_t>(raw_pointer_cast(&t(mn, k, stage))));
}

// Descriptors [instruction along K, stage] of the operands, as if both started at shared-memory address 0.
template <class Mma, class LayoutA, class LayoutB, class T>
void descriptors(Mma mma, LayoutA, LayoutB, T*, bool b, uint64_t* out) {
  auto slice = mma.get_slice(_0{});
  auto null = make_smem_ptr(static_cast<T*>(nullptr));
  auto fa = slice.make_fragment_A(slice.partition_A(make_tensor(null, LayoutA{})));
  auto fb = slice.make_fragment_B(slice.partition_B(make_tensor(null, LayoutB{})));
  for (int i = 0; i < size<2>(fa); ++i)
    for (int stage = 0; stage < size<3>(fa); ++stage) {
      UMMA::SmemDescriptor d = b ? *fb(_, _, i, stage).data() : *fa(_, _, i, stage).data();
      *out++ = d.desc_;
    }
  fflush(stdout);  // CUTLASS says of each that there is no shared memory here
}

}  // namespace

extern "C" {

// What the host code asks of a tensor map: dims [4], strides in bytes [3], box [4], steps (their product), type, swizzle.
// `kind`: 0 K-major, 1 gate and up, 2 column-major.
int tensor_map(int kind, int rows, int k, int box_rows, int stacks, uint64_t* out) {
  CUtensorMap map;
  int e = kind == 0   ? map_k_major(&map, nullptr, rows, k, box_rows, stacks)
          : kind == 1 ? map_gate_up(&map, nullptr, rows, k, stacks)
                      : map_column_major(&map, nullptr, rows, k, box_rows, stacks);
  memcpy(out, noted, sizeof noted);
  return e;
}

void operand_elements(int format, int b, int major, int32_t* out) {
  with_majors(major, major, [&](auto m, auto) {
    constexpr Major M = decltype(m)::value;
    using T = bfloat16_t;
    using X = cutlass::float_e4m3_t;
    if (format) b ? elements(sm100::MxOperandLayout<M, kTileCols>{}, (X*)0, out) : elements(sm100::MxOperandLayout<M, kTileRows>{}, (X*)0, out);
    else b ? elements(sm100::OperandLayout<M, kTileCols>{}, (T*)0, out) : elements(sm100::OperandLayout<M, kTileRows>{}, (T*)0, out);
    return 0;
  });
}

void operand_descriptors(int format, int a_major, int b_major, int b, uint64_t* out) {
  with_majors(a_major, b_major, [&](auto ma, auto mb) {
    constexpr Major A = decltype(ma)::value, B = decltype(mb)::value;
    if (format)
      descriptors(sm100::MxMma<A, B>{}, sm100::MxOperandLayout<A, kTileRows>{}, sm100::MxOperandLayout<B, kTileCols>{}, (cutlass::float_e4m3_t*)0, b, out);
    else
      descriptors(sm100::Mma<A, B>{}, sm100::OperandLayout<A, kTileRows>{}, sm100::OperandLayout<B, kTileCols>{}, (bfloat16_t*)0, b, out);
    return 0;
  });
}

// The instruction descriptor, and M, N, K of an instruction.
uint32_t instruction(int format, int a_major, int b_major, int32_t* mnk) {
  return with_majors(a_major, b_major, [&](auto ma, auto mb) {
    constexpr Major A = decltype(ma)::value, B = decltype(mb)::value;
    auto fill = [&](auto mma) {
      auto shape = typename decltype(mma)::AtomShape_MNK{};
      mnk[0] = size<0>(shape), mnk[1] = size<1>(shape), mnk[2] = size<2>(shape);
      return uint32_t(mma.idesc_);
    };
    return format ? fill(sm100::MxMma<A, B>{}) : fill(sm100::Mma<A, B>{});
  });
}

// Tensor-memory address (lane << 16 | column) of each element [row, col] of a tile, as the products write it.
void accumulator_addresses(int format, uint32_t* out) {
  auto fill = [&](auto mma) {
    auto tile = partition_fragment_C(mma, Shape<Int<kTileRows>, Int<kTileCols>>{});
    for (int row = 0; row < kTileRows; ++row)
      for (int col = 0; col < kTileCols; ++col) *out++ = uint32_t(tile.layout()(make_coord(make_coord(row, col), 0, 0)));
  };
  if (format) fill(sm100::MxMma<Major::K, Major::K>{});
  else fill(sm100::Mma<Major::K, Major::K>{});
}

// For each consumer thread and element of its Accumulator: the address that it is loaded from and (stored to) by the
// traits of the copies, and the row and column that epilogues take it for.
void accumulator_elements(uint32_t* loaded, uint32_t* stored, int32_t* row, int32_t* col) {
  constexpr int kOfCopy = kAccumulatorSize / sm100::kCopies;
  using Load = Copy_Traits<sm100::Load>;
  using Store = Copy_Traits<sm100::Store>;
  for (int thread = 0; thread < kConsumerThreads; ++thread)
    for (int i = 0; i < kAccumulatorSize; ++i) {
      uint32_t first = uint32_t(i / kOfCopy) * sm100::kCopyCols + (uint32_t(sm100::first_row(thread)) << 16);
      *loaded++ = first + uint32_t(Load::ValID{}(Load::DstLayout{}(thread % 32, i % kOfCopy * 32)) / 32);
      *stored++ = first + uint32_t(Store::ValID{}(Store::SrcLayout{}(thread % 32, i % kOfCopy * 32)) / 32);
      *row++ = accumulator_row(thread, i / 2 % 2);
      *col++ = i / 4 * 8 + thread % 4 * 2 + i % 2;
    }
}

// Of a pair of CTAs: elements [128, K, stage] of an operand's half in one CTA, and descriptors [instruction along K, stage]:
// ours, and those of CuTe's own product of two CTAs over the layout that it makes for a half.
void pair_operand(int a_major, int b_major, int b, int32_t* element, uint64_t* ours, uint64_t* theirs) {
  with_majors(a_major, b_major, [&](auto ma, auto mb) {
    constexpr Major A = decltype(ma)::value, B = decltype(mb)::value;
    using T = bfloat16_t;
    b ? elements(sm100::PairLayout<B>{}, (T*)0, element) : elements(sm100::PairLayout<A>{}, (T*)0, element);
    descriptors(sm100::PairHalf<A, B>{}, sm100::PairLayout<A>{}, sm100::PairLayout<B>{}, (T*)0, b, ours);
    auto mma = make_tiled_mma(sm100::PairInstruction<A, B>{});
    auto write = [&](auto fragment) {
      for (int i = 0; i < size<2>(fragment); ++i)
        for (int stage = 0; stage < size<3>(fragment); ++stage)
          *theirs++ = UMMA::SmemDescriptor(*fragment(_, _, i, stage).data()).desc_;
      fflush(stdout);
    };
    auto half = [](auto shape, auto major) {
      constexpr Major M = decltype(major)::value;
      auto order = conditional_t<M == Major::K, Step<_1, _2, _3>, Step<_2, _1, _3>>{};
      return make_tensor(make_smem_ptr(static_cast<T*>(nullptr)),
                         UMMA::tile_to_mma_shape(sm100::Atom<M>{}, append(shape, Int<kPairStages>{}), order));
    };
    if (b) write(mma.make_fragment_B(half(partition_shape_B(mma, Shape<Int<kTileCols>, Int<kTileK>>{}), mb)));
    else write(mma.make_fragment_A(half(partition_shape_A(mma, Shape<Int<2 * kTileRows>, Int<kTileK>>{}), ma)));
    return 0;
  });
}

// Of a pair: the instruction descriptor; tensor-memory addresses of each CTA's [row, col].
uint32_t pair_instruction(int a_major, int b_major, uint32_t* addresses) {
  return with_majors(a_major, b_major, [&](auto ma, auto mb) {
    auto mma = make_tiled_mma(sm100::PairInstruction<decltype(ma)::value, decltype(mb)::value>{});
    auto tile = partition_fragment_C(mma, Shape<Int<2 * kTileRows>, Int<kTileCols>>{});
    static_assert(size(decltype(tile.layout()){}) == kTileRows * kTileCols);
    for (int row = 0; row < kTileRows; ++row)
      for (int col = 0; col < kTileCols; ++col) *addresses++ = uint32_t(tile.layout()(make_coord(make_coord(row, col), 0, 0)));
    return uint32_t(mma.idesc_);
  });
}

// Byte of the scale of [row, value along K] of a matrix of rows x k in global memory: CUTLASS's, and ours.
void scale_bytes(int rows, int k, int32_t* theirs, int32_t* ours) {
  auto layout = sm100::MxScales::tile_atom_to_shape_SFA(make_shape(rows, 1, k, 1));
  for (int row = 0; row < rows; ++row)
    for (int i = 0; i < k; ++i) {
      *theirs++ = int32_t(layout(row, i, 0));
      *ours++ = int32_t(mx_scale_offset(row, i / kMxBlock, k / kMxBlock));
    }
}

// Of a stage: byte in shared memory of the scale of [row, value along K], and the byte of tensor memory
// (4 * (lane << 16 | column) + byte of the word) where the products read it.
void stage_scales(int b, int32_t* shared, int64_t* read) {
  auto fill = [&](auto layout, auto* fragment) {
    using Fragment = remove_pointer_t<decltype(fragment)>;
    auto scales = make_tensor<Fragment>(shape(layout));  // from address 0
    for (int row = 0; row < size<0, 0>(layout); ++row)
      for (int i = 0; i < kMxTileK; ++i) {
        auto at = make_coord(make_coord(row, i % kMxBlock), 0, i / kMxBlock);
        *shared++ = int32_t(layout(at));
        *read++ = int64_t(scales.layout()(at));
      }
  };
  using Mma = sm100::MxMma<Major::K, Major::K>;
  if (b) fill(sm100::MxScalesB{}, (Mma::FrgTypeSFB*)0);
  else fill(sm100::MxScalesA{}, (Mma::FrgTypeSFA*)0);
}

int constant(char const* name) {
  struct { char const* name; int value; } const known[] = {
      {"stages", kStages}, {"accumulators", kAccumulators}, {"mx_accumulators", kMxAccumulators}, {"tile_k", kTileK},
      {"mx_tile_k", kMxTileK}, {"mx_scale_columns", sm100::kMxColumnsA + sm100::kMxColumnsB}, {"shared_bytes", int(sizeof(Stages))},
      {"mx_shared_bytes", int(sizeof(MxStages))}, {"offset_b", int(offsetof(Stages, b))}, {"mx_offset_b", int(offsetof(MxStages, b))},
      {"mx_stage_bytes", int(kMxStageBytes)}, {"pair_stages", kPairStages}, {"pair_stage_bytes", int(kPairStageBytes)},
      {"pair_shared_bytes", int(sizeof(PairStages))}, {"pair_offset_b", int(offsetof(PairStages, b))},
  };
  for (auto const& k : known)
    if (strcmp(k.name, name) == 0) return k.value;
  return -1;
}

}  // extern "C"
