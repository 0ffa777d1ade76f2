// Which levels this processor and operating system can run.
#include <initializer_list>

#include "base/level.h"
#include "base/types.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

namespace {

#if defined(__x86_64__)
struct Leaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  Leaf(unsigned leaf, unsigned sub) { __get_cpuid_count(leaf, sub, &eax, &ebx, &ecx, &edx); }
};

bool has(unsigned word, std::initializer_list<int> bits) {
  for (int bit : bits)
    if (!(word >> bit & 1)) return false;
  return true;
}

uint64_t enabled_state() {
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

// Linux grants tile registers per process, on request (arch_prctl, since 5.16).
bool tiles_granted() {
  constexpr int request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

int detect() {
  Leaf one(1, 0), seven(7, 0), seven_one(7, 1);
  if (!has(one.ecx, {12, 27, 28, 29})) return 0;  // fma, osxsave, avx, f16c
  uint64_t state = enabled_state();
  if ((state & 0x6) != 0x6 || !has(seven.ebx, {3, 5, 8})) return 0;  // bmi, avx2, bmi2
  if ((state & 0xe6) != 0xe6 || !has(seven.ebx, {16, 17, 28, 30, 31})) return 1;  // f dq cd bw vl
  if (!has(seven.ecx, {1, 11}) || !has(seven_one.eax, {5})) return 2;  // vbmi, vnni; bf16
  if ((state & 0x60000) != 0x60000 || !has(seven.edx, {22, 24, 25})) return 3;
  return tiles_granted() ? 4 : 3;
}

// AMD's family 0x19 is Zen 3 and Zen 4.
bool is_zen4() {
  Leaf zero(0, 0), one(1, 0);
  const unsigned family = (one.eax >> 8 & 15) + (one.eax >> 20 & 255);
  return zero.ebx == signature_AMD_ebx && family == 0x19 && detect() >= 2;
}
#elif defined(__aarch64__) && defined(__linux__)
int detect() {
  constexpr unsigned long half = 3u << 9, dots = 1u << 20, sve = 1u << 22;  // AT_HWCAP
  constexpr unsigned long i8mm = 1u << 13, bf16 = 1u << 14;                 // AT_HWCAP2
  constexpr unsigned long sve_i8mm = 1u << 9, sve_bf16 = 1u << 12;
  unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  if ((first & (half | dots)) != (half | dots)) return 0;
  if ((second & (i8mm | bf16)) != (i8mm | bf16)) return 1;
  if (!(first & sve) || (second & (sve_i8mm | sve_bf16)) != (sve_i8mm | sve_bf16)) return 2;
  constexpr int get_length = 51, mask = 0xffff;  // PR_SVE_GET_VL: bytes
  return (prctl(get_length) & mask) == 32 ? 3 : 2;
}
#else
int detect() { return 0; }
#endif

}  // namespace

namespace modulm {
#if defined(__x86_64__)
const bool streams_by_itself = is_zen4();
#else
const bool streams_by_itself = false;
#endif
}  // namespace modulm

// 0 scalar, 1 avx2, 2 avx512, 3 avx512_bf16, 4 amx; on Arm 0 scalar, 1 neon (products of four
// bytes), 2 neon_bf16 (i8mm and bf16), 3 sve256 (the same in SVE): the highest that runs here.
MODULM_API int modulm_highest_level() { return detect(); }
MODULM_API const char* modulm_level() { return MODULM_LEVEL; }
