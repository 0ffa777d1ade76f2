// One call of the attention kernel.
#pragma once

#include "attention/cache.h"
#include "base/math.h"

namespace modulm {

struct Problem {
  const void* q;
  int64_t q_token, q_head;  // strides in elements
  int64_t heads, size, value_size;
  int dtype;
  Cache cache;
  const int32_t* tables;
  int64_t table_stride;
  const int32_t* query_starts;
  const int32_t* context_lens;
  int64_t sequences;
  float scale, softcap;
  int64_t window;
  bool causal;
  // [tokens], or null: which new tokens of its sequence a token sees, a bit each; 0 where all tokens
  // of the sequence are causal. All see what was cached before.
  const uint64_t* masks;
  const float* sinks;
  const float* alibi;
  void* out;  // [tokens, heads, value_size], contiguous

  int64_t group() const { return heads / cache.heads; }
  // Whether a score is just the product times `scale`.
  bool plain_scores() const {
    return scale > 0.0f && !(softcap > 0.0f) && !alibi;
  }
};

}  // namespace modulm
