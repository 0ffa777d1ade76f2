// A convolution along each row, channel by channel, over its last few tokens.
//
// A task takes some channels of one row through all its tokens; a token gets the same result alone
// and in a prompt.
#include "base/math.h"
#include "base/pool.h"
#include "base/replay.h"
#include "recurrence/rows.h"

namespace modulm {
namespace {

constexpr int64_t kChannelsPerTask = 512;

template <class T>
struct Conv {
  const T* x;
  int64_t ldx;
  const T *weight, *bias;
  bool silu;
  T *states, *out;
  int64_t channels, width;
  StateRows rows;
};

// A vector of channels, from `channel` on. room: the weights [width, kLanes], then the inputs
// before the row's first token [width - 1, kLanes].
template <class T>
void lanes_of_row(const Conv<T>& c, int64_t row, int64_t channel, int lanes, float* room) {
  const int64_t past = c.width - 1;
  float *weights = room, *before = room + c.width * kLanes;
  for (int64_t j = 0; j < c.width; j++)
    for (int l = 0; l < kLanes; l++)
      weights[j * kLanes + l] = l < lanes ? load_one(c.weight + (channel + l) * c.width + j) : 0;
  auto state = [&](int64_t slot, int64_t place) {
    return c.states + (slot * past + place) * c.channels + channel;
  };
  for (int64_t i = 0; i < past; i++)
    store(before + i * kLanes,
          c.rows.fresh[row] ? vf{} : load_n(state(c.rows.sources[row], i), lanes));
  const int64_t first = c.rows.starts[row], count = c.rows.starts[row + 1] - first;
  auto input = [&](int64_t token) {
    return token < 0 ? load(before + (past + token) * kLanes)
                     : load_n(c.x + (first + token) * c.ldx + channel, lanes);
  };
  vf bias = c.bias ? load_n(c.bias + channel, lanes) : vf{};
  for (int64_t t = 0; t < count; t++) {
    vf total{};
    for (int64_t j = 0; j < c.width; j++) total += input(t + j - past) * load(weights + j * kLanes);
    total += bias;
    store_n(c.out + (first + t) * c.channels + channel, c.silu ? silu(total) : total, lanes);
  }
  c.rows.stretches(row, [&](int64_t, int64_t end, int64_t slot) {
    for (int64_t i = 0; i < past; i++) store_n(state(slot, i), input(end - past + i), lanes);
  });
}

template <class T>
void convolve(const Conv<T>& c, int64_t rows) {
  int64_t parts = div_up(c.channels, kChannelsPerTask);
  parallel(rows * parts, [&](int64_t task, int) {
    auto* room = static_cast<float*>(scratch(0, 2 * c.width * kLanes * sizeof(float)));
    int64_t begin = task % parts * kChannelsPerTask, left = c.channels - begin;
    for_lanes(left < kChannelsPerTask ? left : kChannelsPerTask, [&](int64_t i, int lanes) {
      lanes_of_row(c, task / parts, begin + i, lanes, room);
    });
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// x: [tokens, channels] with a row stride; weight: [channels, width]; bias: [channels] or null;
// states: [slots, width - 1, channels]; out: contiguous; all of one dtype. kept as for the scan.
MODULM_API void modulm_causal_conv(const void* x, int64_t ldx, const void* weight,
                                   const void* bias, int silu, void* states, void* out,
                                   const int32_t* starts, const int64_t* sources,
                                   const int64_t* slots, const uint8_t* fresh,
                                   const int64_t* kept, int64_t kept_count, int64_t rows,
                                   int64_t channels, int64_t width, int dtype) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    Conv<T> c{static_cast<const T*>(x), ldx, static_cast<const T*>(weight),
              static_cast<const T*>(bias), silu != 0, static_cast<T*>(states),
              static_cast<T*>(out), channels, width,
              {starts, sources, slots, fresh, reinterpret_cast<const Kept*>(kept), kept_count}};
    convolve(c, rows);
  });
}

MODULM_REPLAYABLE(causal_conv)
