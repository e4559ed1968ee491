// The largest magnitude of a block of bf16 numbers.
#pragma once
#include <cstdint>

namespace mok {

// Magnitudes of bf16 numbers as integers, two a word: Inf and NaN are larger than all others, so nothing hides them.
__device__ __forceinline__ uint32_t magnitudes(uint32_t pair) { return pair & 0x7fff7fffu; }
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
// The larger of the two.
__device__ __forceinline__ uint32_t largest(uint32_t pair) { return max(pair & 0xffffu, pair >> 16); }

// The largest magnitude of a block, of which each of four threads has some, as bf16 bits.
__device__ __forceinline__ uint32_t quad_largest(uint32_t pairs) {
  pairs = larger(pairs, __shfl_xor_sync(0xffffffffu, pairs, 1));
  return largest(larger(pairs, __shfl_xor_sync(0xffffffffu, pairs, 2)));
}

}  // namespace mok
