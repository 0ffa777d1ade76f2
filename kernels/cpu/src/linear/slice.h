// What the kernels of integer products share: slices of panels, their scales and their codes.
#pragma once

#include <cstring>
#include <type_traits>

#include "linear/integer.h"

namespace modulm {

// k in [begin, end) of one panel: whole steps. `codes` are those of `begin`.
struct Slice {
  const Weight& w;
  int64_t panel;
  int64_t begin, end;
  const uint32_t* codes;
  bool nibbles;  // packed int4; otherwise quads
  bool centred;  // zeros are already subtracted from the codes, which are plain nibbles
  bool stream;   // codes are read from memory sequentially: prefetch them
  Ahead* next;   // what follows them, to be fetched meanwhile, or null
  // Once for all tiles: divisions take as long as a third of one.
  bool grouped = w.grouped();
  int64_t first_run = begin / w.run();
  int64_t first_scale = grouped ? w.scale_index(panel, begin / w.group) : 0;

  int64_t step_end(int64_t k) const { return k + kStep < end ? k + kStep : end; }
};

// Scale and zero point of Vectors * kLanes columns in one run; the zero point is relative to the
// offset code. If one group is all of K, the scale here is 1: the group's scale is applied at the
// end.
template <int Vectors>
struct Group {
  vf scale[Vectors], zero[Vectors];

  Group(const Weight& w, int64_t panel, int64_t run, int column) {
    for (int v = 0; v < Vectors; v++) scale[v] = splat(1.0f), zero[v] = vf{};
    if (w.grouped()) {
      int64_t at = w.scale_index(panel, run * w.run() / w.group) + column;
      load_scales(w.scales, at, w.scale_dtype, scale);
      if (w.zeros) load_scales(w.zeros, at, w.scale_dtype, zero);
    }
  }
};

// part + scale * (dot - zero * total), where the contribution of the codes' offset is already
// subtracted from `dot`. `total` is of the row's codes. All is exact except for a fractional zero
// point and the last sum.
inline vf add_run(vf part, vi dot, vf scale, bool zeros, vf zero, float total) {
  vf exact = __builtin_convertvector(dot, vf);
  return fused(zeros ? fused(zero, -total, exact) : exact, scale, part);
}

// Scales and zero points of the runs of one panel, in the order of k, prefetched: they are two
// streams next to the codes, too sparse for the hardware prefetcher. A group is a run, or all of K.
template <int Vectors>
class Scales {
 public:
  Scales(const Slice& s, int column, bool fetches = true)
      : w_(s.w),
        fetches_(fetches),
        at_(s.first_scale + column),
        next_(s.w.group == s.w.run() ? s.w.width(s.panel) : 0) {
    for (int v = 0; v < Vectors; v++) scale[v] = splat(1.0f), zero[v] = vf{};
  }

  vf scale[Vectors], zero[Vectors];

  // Those of the next run; only scales if there are no zero points.
  void load() {
    const int64_t bytes = scale_bytes(w_.scale_dtype);
    fetch(w_.scales, bytes);
    load_scales(w_.scales, at_, w_.scale_dtype, scale);
    if (w_.zeros) {
      fetch(w_.zeros, bytes);
      load_scales(w_.zeros, at_, w_.scale_dtype, zero);
    }
    at_ += next_;
  }

 private:
  void fetch(const void* from, int64_t bytes) const {
    if (!fetches_) return;
    auto line = static_cast<const char*>(from) + (at_ + kScalesAhead) * bytes;
    for (int64_t i = 0; i < Vectors * kLanes * bytes; i += 64) __builtin_prefetch(line + i);
  }

  const Weight& w_;
  const bool fetches_;
  int64_t at_, next_;
};

// What `of` has for the digits of a row, as one number.
template <int Digits, class F>
inline auto join_digits(int row, F&& of) {
  if constexpr (Digits == 2) return of(2 * row) * 256 + of(2 * row + 1);
  else return of(row);
}

// f(rows as a constant): Rows, Rows + Step ... Most.
template <int Step, int Most, int Rows = Step, class F>
inline void with_rows(int rows, F&& f) {
  if constexpr (Rows <= Most) {
    if (rows == Rows) return f(std::integral_constant<int, Rows>{});
    with_rows<Step, Most, Rows + Step>(rows, f);
  }
}

// How codes are stored: quads, nibbles, nibbles that index a table, or numbers of 16 bits (wide.h).
enum Lying : int { kQuads, kNibbles, kLookedUp, kWidened };

// f(how codes are stored). nibbles: whether those of the weight are still packed.
template <class F>
inline void with_lying(const Weight& w, bool nibbles, F&& f) {
  if (!nibbles) return f(std::integral_constant<Lying, kQuads>{});
  if (w.table) return f(std::integral_constant<Lying, kLookedUp>{});
  f(std::integral_constant<Lying, kNibbles>{});
}

// The unsigned codes of nibbles, one to a byte.
class Lookup {
 public:
  explicit Lookup(int table) {
    for (size_t i = 0; i < sizeof(vu); i += 16)
      std::memcpy(reinterpret_cast<char*>(&codes_) + i, kTableCodes[table], 16);
  }
  vu operator()(vu nibbles) const {
#if defined(__AVX512BW__)
    return (vu)_mm512_shuffle_epi8((__m512i)codes_, (__m512i)nibbles);
#elif defined(__AVX2__)
    return (vu)_mm256_shuffle_epi8((__m256i)codes_, (__m256i)nibbles);
#else
    typedef uint8_t bytes __attribute__((vector_size(sizeof(vu))));
    return (vu)__builtin_shuffle((bytes)codes_, (bytes)nibbles);
#endif
  }

 private:
  vu codes_;
};

// The codes of a line, its low or its high ones.
template <Lying Kind>
inline vu codes_of(vu line, bool upper, const Lookup& code_of) {
  if (Kind == kQuads) return line;
  const vu nibbles = (upper ? line >> 4 : line) & 0x0f0f0f0fu;
  return Kind == kLookedUp ? code_of(nibbles) : nibbles;
}

#if defined(__AMX_INT8__)
// Tiles multiply signed codes, too: integer zero points can be subtracted while codes are unpacked.
constexpr bool kSpreadCentred = true, kTiled = true;
#else
constexpr bool kSpreadCentred = false, kTiled = false;
#endif

// Packed nibbles [(end - begin) / 8][width] to quads [(end - begin) / 4][width], looked up, or less
// their zeros if `centred`.
inline void spread_nibbles(const Slice& s, bool centred, uint32_t* to) {
  typedef uint8_t bytes __attribute__((vector_size(sizeof(vu))));
  const uint32_t* from = s.codes;
  const Lookup code_of(s.w.table);
  int width = s.w.width(s.panel);
  for (int64_t k = s.begin; k < s.end;) {
    int64_t run = k / s.w.run(), end = s.w.run_end(run) < s.end ? s.w.run_end(run) : s.end;
    int64_t lines = (end - k) / 8;
    for (int c = 0; c < width; c += kLanes) {
      Group<1> group(s.w, s.panel, run, c);
      vu zero = (vu)(__builtin_convertvector(group.zero[0], vi) + s.w.centre()) * 0x01010101u;
      bytes less = centred ? (bytes)zero : bytes{};
      for (int64_t i = 0; i < lines; i++) {
        if (kTiled) __builtin_prefetch(from + i * width + c + kQuadsAhead);
        vu x = load_raw<vu>(from + i * width + c);
        vu low = x & 0x0f0f0f0fu, high = x >> 4 & 0x0f0f0f0fu;
        if (s.w.table) low = code_of(low), high = code_of(high);
        store_raw(to + 2 * i * width + c, (bytes)low - less);
        store_raw(to + (2 * i + 1) * width + c, (bytes)high - less);
      }
    }
    from += lines * width;
    to += 2 * lines * width;
    k = end;
  }
}

}  // namespace modulm
