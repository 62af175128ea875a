// Which sections of which tensors are added in one go: all that there is memory for.
#pragma once
#include <memory>
#include <vector>

#include "sections.h"

namespace hvc {
namespace {

// Sections that cannot be read are known before any kernel starts: their ranges are counted here.
__global__ void count_kernel(int64_t* total, int64_t count) { add_count(total, count); }

inline void count_all_ranges(const Cut& cut, int64_t* wrong, Launch launch) {
  start_blocks(count_kernel, 1, 1, launch, wrong, std::max<int64_t>(cut.number, 1));
}

// Entries of a round, if not of one section: memory of 128 MB, or 256 for float64.
constexpr int64_t kMostEntries = 1 << 24;

// What one round takes: some sections of tensors.
template <class T> struct Turn {
  std::vector<Summed<T>> tensors;
  std::vector<Sent> parts;
  int64_t ranges = 0, entries = 0;

  // Adds a section of the last tensor.
  void add(const Section& section) {
    Summed<T>& t = tensors.back();
    const bool by_bytes = room_by_bytes(section, t.form) < t.cut.count;
    parts.push_back({{section, entries, by_bytes}, t.cut.number, ranges, t.form});
    ++t.parts;
    ranges += t.cut.number;
    entries += room_of(section, t.cut.count, t.form);
  }
};

// Calls run(lists, tables): tables(units, use) calls use(table) with the tensors of a turn, each of so many units.
template <class T, class Bytes, class Run>
void with_lists(const Turn<T>& turn, const Bytes& bytes, Launch launch, const Run& run) {
  using W = Work<T>;
  const auto number = int64_t(turn.parts.size());
  const Scratch<Part> parts(number, launch);
  const Scratch<int64_t> offsets(turn.ranges, launch);
  const Scratch<List> found(turn.ranges, launch);
  const Scratch<Entry<W>> entries(turn.entries, launch);
  in_tables<Sent>(
      number, [&](int64_t i) { return turn.parts[size_t(i)]; }, [](int64_t) { return int64_t(1); },
      [&](const auto& table, int64_t first) {
        start_blocks(offsets_kernel<Bytes, std::decay_t<decltype(table)>>, std::min(table.count, kMostBlocks), kThreads,
                     launch, table, bytes, parts.get() + first, offsets.get());
      });
  const auto tensor = [&](int64_t i) { return turn.tensors[size_t(i)]; };
  run(Lists<W>{parts.get(), offsets.get(), entries.get(), found.get()}, [&](const auto& units, const auto& use) {
    in_tables<Summed<T>>(
        int64_t(turn.tensors.size()), tensor, [&](int64_t i) { return units(turn.tensors[size_t(i)]); },
        [&](const auto& table, int64_t) {
          if (table.units() > 0) use(table);
        });
  });
}

// The sections of a tensor that are left to be added.
template <class T> struct Rest {
  Summed<T> tensor;
  std::vector<const Section*> readable;
  const Section* mine;  // the own one, if that can be read
  size_t next = 0;
  bool done = false;
  std::unique_ptr<Scratch<Work<T>>> sums;
  std::unique_ptr<Scratch<uint16_t>> senders;

  // How many sections a turn takes, and how many entries: no more than there are elements or memory is meant for, if
  // not one section needs them.
  size_t end(int64_t& entries) const {
    size_t end = next;
    for (entries = 0; end < readable.size(); ++end) {
      const int64_t more = room_of(*readable[end], tensor.cut.count, tensor.form);
      if (end > next && entries + more > std::min(tensor.cut.count, kMostEntries)) break;
      entries += more;
    }
    return end;
  }

  void take(size_t end, bool by_senders, Turn<T>& turn, Launch launch) {
    Summed<T> t = tensor;
    t.begins = next == 0, t.ends = done = end == readable.size();
    if (!t.ends && !sums) sums = std::make_unique<Scratch<Work<T>>>(t.cut.count, launch);
    if (sums && by_senders && !senders) senders = std::make_unique<Scratch<uint16_t>>(t.cut.count, launch);
    t.sums = sums ? sums->get() : nullptr;
    t.senders = senders ? senders->get() : nullptr;
    const auto first = readable.begin() + int64_t(next), last = readable.begin() + int64_t(end);
    const auto at = std::find(first, last, mine);
    t.own = at != last ? at - first : -1;
    if (mine ? t.own < 0 : !t.ends) t.residual = nullptr;
    t.first_part = int64_t(turn.parts.size()), t.parts = 0, t.first_range = turn.ranges;
    turn.tensors.push_back(t);
    for (; next < end; ++next) turn.add(*readable[next]);
  }
};

// Adds up the sections of tensors that can be read, as many of each, those of the first tensor first, and writes the
// results. `read` starts the kernel that makes lists of the sections in a table, and `ranges` its units.
template <bool kMayCount = false, class T, class Bytes, class Read>
void add_sections(const std::vector<Summed<T>>& tensors, const Section* sections, int64_t ranks, int64_t own,
                  const Settle<T>& settle, const Bytes& bytes, Launch launch, const Read& read) {
  std::vector<Rest<T>> rests;
  for (const Summed<T>& tensor : tensors) {
    Rest<T> rest{};
    rest.tensor = tensor;
    for (int64_t rank = 0; rank < ranks; ++rank, ++sections) {
      const bool readable = sections->bytes >= tensor.form.head;
      if (readable && rank == own) rest.mine = sections;
      if (readable)
        rest.readable.push_back(sections);
      else
        count_all_ranges(tensor.cut, tensor.wrong, launch);
    }
    rests.push_back(std::move(rest));
  }
  Turn<T> turn;
  const auto finish = [&] {
    with_lists(turn, bytes, launch, [&](const Lists<Work<T>>& lists, const auto& tables) {
      tables([](const Summed<T>& t) { return t.parts * t.cut.number; }, [&](const auto& table) { read(table, lists); });
      tables([](const Summed<T>& t) { return chunks_of(t.cut); },
             [&](const auto& table) {
               using Table = std::decay_t<decltype(table)>;
               auto kernel = settle_kernel<T, false, Table>;
               if constexpr (kMayCount) kernel = settle.by_senders ? settle_kernel<T, true, Table> : kernel;
               start_blocks(kernel, std::min(table.units(), kMostBlocks), kThreads, launch, table, lists, settle);
             });
    });
    turn = {};
  };
  for (bool more = !rests.empty(); more;) {
    more = false;
    for (Rest<T>& rest : rests) {
      if (rest.done) continue;
      int64_t entries;
      const size_t end = rest.end(entries);
      if (!turn.tensors.empty() && turn.entries + entries > kMostEntries) finish();
      rest.take(end, settle.by_senders, turn, launch);
      more = more || !rest.done;
    }
    if (!turn.tensors.empty()) finish();
  }
}

}  // namespace
}  // namespace hvc
