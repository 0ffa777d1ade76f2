// Products of activations of two digits as numbers of 16 bits, where bytes have no product of their
// own (AVX2): codes are widened to 16 bits for either digit anyway.
//
// A row lies where its two digits would, as pairs of 16 bits: of a quad of k first 0 and 2, then 1
// and 3, which is how bytes of codes become pairs by a mask and by a shift. Sums of a run fit in 32
// bits, 256 * 255 * 32639 < 2^31. They lie in the first of a row's two rows of sums, the second stays
// zero.
#pragma once

#include "linear/activations.h"

namespace modulm {

// Like `integer_sums`, for weights of which wide_digits is true.
void wide_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row, int64_t digits,
               float* sums);

}  // namespace modulm
