// Products of pairs of 16 bits, for levels whose bytes have no product of their own (AVX2).
#pragma once

#include "base/vec.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#define MODULM_WIDE_PAIRS 1

namespace modulm {

// The pair at `x` in all lanes.
inline __m256i load_pairs(const void* x) {
  return _mm256_set1_epi32(load_raw<int32_t>(static_cast<const char*>(x)));
}

// sum += both products of each lane. Statements of assembly, because compilers change the order of
// additions, and then hold more products than there are registers.
inline void add_pairs(vi& sum, __m256i a, __m256i b) {
  __m256i product;
  __asm__(
      "vpmaddwd %[b], %[a], %[product]\n\t"
      "vpaddd %[product], %[sum], %[sum]"
      : [sum] "+x"(sum), [product] "=&x"(product)
      : [a] "x"(a), [b] "x"(b));
}

// The same for unsigned bytes times signed ones, in 16 bits.
inline void add_bytes(__m256i& sum, __m256i codes, __m256i bytes) {
  __m256i product;
  __asm__(
      "vpmaddubsw %[bytes], %[codes], %[product]\n\t"
      "vpaddw %[product], %[sum], %[sum]"
      : [sum] "+x"(sum), [product] "=&x"(product)
      : [codes] "x"(codes), [bytes] "x"(bytes));
}

// The first for two sums and the pair at `x`, with two registers beside sums and operands.
inline void add_pairs(vi& first, vi& second, __m256i a, __m256i b, const void* x) {
  struct Pair {
    char bytes[4];
  };
  __m256i pair, product;
  __asm__(
      "vpbroadcastd %[x], %[pair]\n\t"
      "vpmaddwd %[pair], %[a], %[product]\n\t"
      "vpaddd %[product], %[first], %[first]\n\t"
      "vpmaddwd %[pair], %[b], %[pair]\n\t"
      "vpaddd %[pair], %[second], %[second]"
      : [first] "+x"(first), [second] "+x"(second), [pair] "=&x"(pair), [product] "=&x"(product)
      : [a] "x"(a), [b] "x"(b), [x] "m"(*static_cast<const Pair*>(x)));
}

}  // namespace modulm

#endif
