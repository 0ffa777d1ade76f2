// Repeats recorded calls of the kernels' C functions and compares what they write.
//
//   replay_calls LIBRARY LEVEL FOLDER
//
// FOLDER is record_calls.py's. Floats may differ by rounding: sums have another order, and products
// of bf16 pairs round once. Bytes that are rounded numbers may, seldom, be the neighbouring code. So
// may what the two products of experts multiply, which is rounded to bf16 or int8: a number that lies
// 1e-5 of a spacing from a tie changes its row's fp32 results by a spacing times its weights. Inputs in
// bf16 often lie on one (in 10 of 45 rows of one call): 127 / (the row's largest) times another has few
// bits. Levels differ there, since some round that product before they add to it, and some do not.
#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Word = uint64_t;
// Integers and pointers are passed in other registers than floats, and on the stack in 8 bytes each.
using Function = Word (*)(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                          Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word,
                          Word, Word, Word, Word, Word, Word, Word, Word, float, float, float, float,
                          float, float, float, float);

Word call(void* address, const std::vector<Word>& given, const std::vector<float>& floats) {
  Word a[32] = {};
  float f[8] = {};
  std::copy(given.begin(), given.end(), a);
  std::copy(floats.begin(), floats.end(), f);
  return reinterpret_cast<Function>(address)(
      a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14],
      a[15], a[16], a[17], a[18], a[19], a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27],
      a[28], a[29], a[30], a[31], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]);
}

struct Buffer {
  char kind;
  std::vector<char> wanted, memory;
  bool written;
};

double half(uint16_t bits) {
  int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  double size = exponent == 31  ? (mantissa ? NAN : INFINITY)
                : exponent == 0 ? std::ldexp(mantissa, -24)
                                : std::ldexp(1024 + mantissa, exponent - 25);
  return bits >> 15 ? -size : size;
}

double number(const char* p, char kind, size_t i) {
  if (kind == 'd') return reinterpret_cast<const double*>(p)[i];
  if (kind == 'f') return reinterpret_cast<const float*>(p)[i];
  uint16_t bits = reinterpret_cast<const uint16_t*>(p)[i];
  if (kind == 'h') return half(bits);
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Returns what differs, "" if nothing does. rounded_inside: results are sums of rounded numbers, of
// which few may be neighbours: 1/16 of the results may differ by what one bf16 spacing, at most 2^-7
// of a term, changes in a sum whose terms are at most the largest result.
std::string compare(const Buffer& b, bool rounded_inside) {
  char text[160];
  const char *got = b.memory.data(), *wanted = b.wanted.data();
  size_t size = b.memory.size();
  if (std::memcmp(got, wanted, size) == 0) return "";
  if (b.kind == 'i') {
    size_t other = 0, far = 0;
    for (size_t i = 0; i < size; i++) {
      int distance = std::abs(int(uint8_t(got[i])) - int(uint8_t(wanted[i])));
      other += distance != 0;
      far += distance > 1 && distance < 255;
    }
    if (b.written && far == 0 && other * 50 <= size + 50) return "";
    std::snprintf(text, sizeof text, "%zu of %zu bytes differ, %zu by more than one", other, size, far);
    return text;
  }
  size_t each = b.kind == 'd' ? 8 : b.kind == 'f' ? 4 : 2, count = size / each;
  double most = 0;
  for (size_t i = 0; i < count; i++) {
    double value = std::fabs(number(wanted, b.kind, i));
    if (std::isfinite(value) && value > most && value < 1e30) most = value;
  }
  size_t neighbours = 0;
  double share = b.kind == 'h' ? 1.0 / 256 : b.kind == 'b' ? 1.0 / 64 : 1.0 / 8192;
  for (size_t i = 0; i < count; i++) {
    double x = number(got, b.kind, i), y = number(wanted, b.kind, i);
    if ((std::isnan(x) && std::isnan(y)) || x == y) continue;
    if (b.written && std::fabs(x - y) <= share * (std::fabs(y) + most / 16)) continue;
    bool near = b.written && rounded_inside && std::fabs(x - y) <= most / 128;
    if (near && ++neighbours * 16 <= count) continue;
    std::snprintf(text, sizeof text, "number %zu of %zu is %g instead of %g", i, count, x, y);
    return text;
  }
  return "";
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) return std::puts("replay_calls LIBRARY LEVEL FOLDER"), 2;
  void* library = dlopen(words[1], RTLD_NOW);
  if (!library) return std::puts(dlerror()), 2;
  auto name = reinterpret_cast<const char* (*)()>(dlsym(library, "modulm_level"));
  auto highest = reinterpret_cast<int (*)()>(dlsym(library, "modulm_highest_level"));
  auto threads = reinterpret_cast<void (*)(int)>(dlsym(library, "modulm_set_threads"));
  if (!name || std::strcmp(name(), words[2]) != 0) return std::puts("another level"), 2;
  threads(2);
  std::string folder = words[3];
  std::ifstream index(folder + "/index"), memory(folder + "/memory", std::ios::binary);
  std::map<std::string, int> done;
  int calls = 0, wrong = 0;
  for (std::string line, word, op, known; std::getline(index, line);) {
    size_t arguments, buffers;
    std::istringstream(line) >> word >> op >> arguments >> buffers >> known;
    std::vector<std::string> lines(arguments);
    for (auto& each : lines) std::getline(index, each);
    std::vector<Buffer> held(buffers);
    for (auto& b : held) {
      std::getline(index, line);
      long size, before, after;
      std::istringstream(line) >> word >> b.kind >> size >> before >> after;
      b.memory.resize(size);
      memory.seekg(before).read(b.memory.data(), size);
      b.wanted = b.memory;
      b.written = after >= 0;
      if (b.written) memory.seekg(after).read(b.wanted.data(), size);
    }
    std::vector<Word> given;
    std::vector<float> floats;
    for (auto& each : lines) {
      std::istringstream in(each);
      std::string kind, value;
      in >> kind >> value;
      if (kind == "f") floats.push_back(std::strtof(value.c_str(), nullptr));
      else if (kind == "p") {
        size_t offset;
        in >> offset;
        given.push_back(Word(uintptr_t(held[std::stoul(value)].memory.data() + offset)));
      } else given.push_back(Word(std::strtoll(value == "True" ? "1" : value.c_str(), nullptr, 10)));
    }
    void* address = dlsym(library, ("modulm_" + op).c_str());
    if (!address) {
      std::printf("%s is missing\n", op.c_str());
      return 1;
    }
    Word result = call(address, given, floats);
    const int kF32 = 4, kF16 = 5;  // forms of weights whose products are not rounded between
    bool rounded_inside = op == "experts" && given[14] != kF32 && given[14] != kF16;
    calls++;
    done[op]++;
    if (known != "-" && int32_t(result) != int32_t(std::stoll(known))) {
      std::printf("call %d, %s returns %d instead of %s\n", calls, op.c_str(), int(result), known.c_str());
      wrong++;
    }
    for (size_t i = 0; i < buffers; i++) {
      std::string difference = compare(held[i], rounded_inside);
      if (difference.empty()) continue;
      std::printf("call %d, %s, buffer %zu: %s\n", calls, op.c_str(), i, difference.c_str());
      wrong++;
    }
  }
  std::printf("%s (highest %d): %d calls of %zu functions, %d differences\n", name(), highest(), calls,
              done.size(), wrong);
  return wrong ? 1 : 0;
}
