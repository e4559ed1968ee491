// What the kernels make of bf16 numbers in MXFP8, compiled for the host: formats/mxfp8.cuh, block by block.
#include "formats/mxfp8.cuh"

using namespace mok;

// `blocks` blocks of 32 bf16 numbers: their FP8 values, the byte of their scale, and the values times the scale as bf16.
extern "C" void mx_blocks(int blocks, int e5m2, uint16_t const* in, uint16_t* values, uint8_t* scales, uint16_t* back) {
  Fp8 type = e5m2 ? Fp8::kE5M2 : Fp8::kE4M3;
  for (int b = 0; b < blocks; ++b) {
    uint32_t pairs[16], amax = 0;
    for (int i = 0; i < 32; ++i) {
      uint32_t bits = in[32 * b + i] & 0x7fff;
      amax = bits > amax ? bits : amax;
    }
    memcpy(pairs, in + 32 * b, sizeof pairs);
    scales[b] = uint8_t(mx_scale(amax, type));
    for (int i = 0; i < 16; ++i) values[16 * b + i] = uint16_t(to_mx(pairs[i], mx_multiplier(scales[b]), type));
    round_to_mx(pairs, amax, type);
    memcpy(back + 32 * b, pairs, sizeof pairs);
  }
}
