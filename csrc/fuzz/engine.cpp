// A small fuzzer for compilers that have none: the same targets run under it and under libFuzzer.
//
// It keeps what reaches a place of the code, or a place more often, than all before, and changes that at random, as
// libFuzzer does. What g++ puts at every branch (-fsanitize-coverage=trace-pc) counts the places.
//
//   TARGET FOLDER... [-max_total_time=SECONDS] [-runs=NUMBER] [-seed=NUMBER] [-artifact_prefix=PATH]
//
// With -runs=0 it only replays the folders' files. New inputs go to the first folder. An input that ends the process is
// left at PATH crash.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <unistd.h>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" void __sanitizer_set_death_callback(void (*callback)());

namespace {

using Input = std::vector<uint8_t>;
namespace fs = std::filesystem;

constexpr size_t kPlaces = 1 << 16, kMostBytes = 4096;
constexpr unsigned kSecondsForOne = 30;

uint8_t reached[kPlaces], known[kPlaces];
const Input* running = nullptr;
std::string artifact = "crash";

// How often a place is reached counts in powers of two.
uint8_t bucket(uint8_t times) { return times == 0 ? 0 : uint8_t(1u << std::min(7, 31 - __builtin_clz(times))); }

// Also called while the process dies: plain writes only.
void save_crash() {
  if (running == nullptr) return;
  if (FILE* file = fopen((artifact + "crash").c_str(), "wb")) {
    fwrite(running->data(), 1, running->size(), file);
    fclose(file);
    fprintf(stderr, "the input is in %scrash\n", artifact.c_str());
  }
  running = nullptr;
}

void on_signal(int signal) {
  fprintf(stderr, "ended by signal %d (%s)\n", signal, signal == SIGALRM ? "one input took too long" : "abort");
  save_crash();
  _exit(77);
}

// Whether the input reaches something new.
bool run(const Input& input) {
  memset(reached, 0, sizeof reached);
  running = &input;
  alarm(kSecondsForOne);
  // A block of exactly its size: the sanitizer sees a byte read beyond it.
  const Input exact(input.begin(), input.end());
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
  alarm(0);
  running = nullptr;
  bool fresh = false;
  for (size_t place = 0; place < kPlaces; ++place) {
    const uint8_t now = bucket(reached[place]);
    fresh |= (now & ~known[place]) != 0;
    known[place] |= now;
  }
  return fresh;
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t below(size_t bound) { return bound == 0 ? 0 : size_t(random_() % bound); }

  Input change(const Input& from, const Input& other) {
    Input made = from;
    for (size_t times = 1 + below(5); times > 0; --times) once(made, other);
    if (made.size() > kMostBytes) made.resize(kMostBytes);
    return made;
  }

 private:
  void once(Input& made, const Input& other) {
    static constexpr uint8_t kTelling[] = {0, 1, 0x7f, 0x80, 0xff, 0xfe, 0x40, 0xc0};
    const size_t at = below(made.size());
    const size_t length = std::min(1 + below(16), made.size() - at);
    switch (made.empty() ? 4 : below(8)) {
      case 0:
        made[at] ^= uint8_t(1u << below(8));
        break;
      case 1:
        made[at] = uint8_t(below(256));
        break;
      case 2:
        made[at] = kTelling[below(sizeof kTelling)];
        break;
      case 3:
        made[at] = uint8_t(made[at] + below(33) - 16);
        break;
      case 4: {
        const Input some(1 + below(32), uint8_t(below(2) ? below(256) : kTelling[below(sizeof kTelling)]));
        made.insert(made.begin() + long(at), some.begin(), some.end());
        break;
      }
      case 5:
        made.erase(made.begin() + long(at), made.begin() + long(at + length));
        break;
      case 6: {  // a part of another input, over this one or behind the place
        const size_t from = below(other.size()), number = std::min(1 + below(64), other.size() - from);
        const auto begin = other.begin() + long(from);
        if (below(2)) made.resize(std::max(made.size(), std::min(kMostBytes, at + number)));
        std::copy(begin, begin + long(std::min(number, made.size() - at)), made.begin() + long(at));
        break;
      }
      default: {  // a number of two or four bytes
        const auto value = uint32_t(below(4) ? below(600) : random_());
        const size_t size = std::min<size_t>(below(2) ? 2 : 4, made.size() - at);
        memcpy(made.data() + at, &value, size);
      }
    }
  }

  std::mt19937_64 random_;
};

Input read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string& folder, const Input& input) {
  uint64_t name = 14695981039346656037u;
  for (const uint8_t byte : input) name = (name ^ byte) * 1099511628211u;
  char text[24];
  snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(name));
  std::ofstream(fs::path(folder) / text, std::ios::binary)
      .write(reinterpret_cast<const char*>(input.data()), long(input.size()));
}

struct Options {
  std::vector<std::string> folders;
  long seconds = 0, runs = -1, seed = 1;
};

Options options_of(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string text = arguments[i];
    const size_t equal = text.find('=');
    const std::string name = text.substr(0, equal), value = equal == std::string::npos ? "" : text.substr(equal + 1);
    if (name == "-max_total_time")
      options.seconds = atol(value.c_str());
    else if (name == "-runs")
      options.runs = atol(value.c_str());
    else if (name == "-seed")
      options.seed = atol(value.c_str());
    else if (name == "-artifact_prefix")
      artifact = value;
    else
      options.folders.push_back(text);
  }
  return options;
}

std::vector<Input> replay(const std::vector<std::string>& folders) {
  std::vector<fs::path> paths;
  for (const std::string& folder : folders) {
    if (!fs::is_directory(folder)) paths.push_back(folder);
    if (fs::is_directory(folder))
      for (const auto& entry : fs::directory_iterator(folder)) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Input> corpus;
  for (const fs::path& path : paths) {
    corpus.push_back(read(path));
    run(corpus.back());
  }
  return corpus;
}

}  // namespace

extern "C" __attribute__((no_sanitize_address, no_sanitize_undefined)) void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t& times = reached[(place ^ place >> 16) % kPlaces];
  times = uint8_t(times + (times != 255));
}

int main(int count, char** arguments) {
  const Options options = options_of(count, arguments);
  for (const int number : {SIGABRT, SIGALRM, SIGSEGV, SIGFPE, SIGILL, SIGBUS}) signal(number, on_signal);
  __sanitizer_set_death_callback(save_crash);
  std::vector<Input> corpus = replay(options.folders);
  const size_t given = corpus.size();
  if (corpus.empty()) corpus.push_back({});
  Mutator mutator{uint64_t(options.seed)};
  long runs = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(options.seconds);
  while (options.runs >= 0 ? runs < options.runs : std::chrono::steady_clock::now() < end) {
    // What came last is likeliest to lead further.
    const size_t last = corpus.size() - 1 - mutator.below(std::min<size_t>(corpus.size(), 16));
    const Input& from = corpus[mutator.below(3) ? mutator.below(corpus.size()) : last];
    Input made = mutator.change(from, corpus[mutator.below(corpus.size())]);
    ++runs;
    if (!run(made)) continue;
    if (!options.folders.empty() && fs::is_directory(options.folders[0])) write(options.folders[0], made);
    corpus.push_back(std::move(made));
  }
  size_t places = 0;
  for (const uint8_t times : known) places += times != 0;
  printf("%zu files replayed, %ld runs, %zu inputs kept, %zu places reached\n", given, runs, corpus.size(), places);
  return 0;
}
