// Where the tokens of a step are: their sequences, positions, and cached predecessors.
#pragma once

#include <algorithm>

#include "base/types.h"

namespace modulm {

struct StepRows {
  const int32_t* tables;
  int64_t table_stride;
  const int32_t* query_starts;
  const int32_t* context_lens;
  int64_t sequences;

  int64_t tokens() const { return query_starts[sequences]; }
  int64_t sequence_of(int64_t token) const {
    return std::upper_bound(query_starts, query_starts + sequences + 1, int32_t(token)) -
           query_starts - 1;
  }
  int64_t position(int64_t sequence, int64_t token) const {
    return context_lens[sequence] - query_starts[sequence + 1] + token;
  }
  const int32_t* table(int64_t sequence) const { return tables + sequence * table_stride; }
};

}  // namespace modulm
