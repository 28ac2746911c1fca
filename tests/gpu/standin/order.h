// What is ordered before what: a clock for each stream, moved on by each kernel and joined by events and waits. It finds
// missing synchronization without a delay that would show it: a kernel that uses memory which another stream may still
// write, or writes what another may still read, and memory that is freed while a stream other than its own may use it
// (record_stream was not called). What the host reads from pinned memory is not seen; late copies show that.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace order {
using Key = int;  // of a stream
using Clock = std::map<Key, uint64_t>;  // how many kernels of each stream are over

struct Block {  // of memory
  Key home = -1, writer = -1;
  uint64_t written = 0;
  Clock reads = {};  // since then
  std::set<Key> recorded = {};  // by record_stream
  Clock before = {};  // uses of the memory before it was freed, which events order before the next one
};

inline std::mutex g_mutex;
inline std::map<Key, Clock> g_streams;
inline Clock g_host;
inline std::string g_pending;  // found where nothing can be raised

inline void join(Clock& into, const Clock& from) {
  for (auto& [key, count] : from) into[key] = std::max(into[key], count);
}
inline bool knows(const Clock& clock, Key key, uint64_t count) {
  auto found = clock.find(key);
  return found != clock.end() && found->second >= count;
}
inline std::string name(Key key, int streams) {
  return "stream " + std::to_string(key % streams) + " of device " + std::to_string(key / streams);
}
inline Clock now(Key stream) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return g_streams[stream];
}
inline void stream_waits(Key stream, const Clock& clock) {
  std::lock_guard<std::mutex> lock(g_mutex);
  join(g_streams[stream], clock);
}
inline void host_waits(const Clock& clock) {
  std::lock_guard<std::mutex> lock(g_mutex);
  join(g_host, clock);
}
/// The next kernel of a stream: it runs after all that the host has waited for.
inline void begin(Key stream) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto& clock = g_streams[stream];
  join(clock, g_host);
  ++clock[stream];
}
/// It uses a block. Returns what is wrong with that.
inline std::string use(Block& block, Key stream, bool writes, int streams) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto& clock = g_streams[stream];
  std::string wrong;
  for (auto& [user, count] : block.before)
    if (user != stream && !knows(clock, user, count))
      wrong = "uses memory that was freed while " + name(user, streams) + " used it";
  block.before.clear();
  if (block.writer >= 0 && block.writer != stream && !knows(clock, block.writer, block.written))
    wrong = std::string(writes ? "writes" : "reads") + " memory that " + name(block.writer, streams) + " writes";
  for (auto& [reader, count] : block.reads)
    if (writes && reader != stream && !knows(clock, reader, count))
      wrong = "writes memory that " + name(reader, streams) + " reads";
  if (writes) {
    block.writer = stream, block.written = clock[stream];
    block.reads.clear();
  } else {
    block.reads[stream] = clock[stream];
  }
  return wrong.empty() ? wrong : name(stream, streams) + " " + wrong + ", and did not wait for it";
}
/// What is not over, as far as its own stream knows, when a block is freed. The next user must know it.
inline Clock unfinished(const Block& block) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto uses = block.reads;
  if (block.writer >= 0) uses[block.writer] = std::max(uses[block.writer], block.written);
  auto& clock = g_streams[block.home];
  std::erase_if(uses, [&](auto& one) {
    return one.first == block.home || knows(clock, one.first, one.second) || knows(g_host, one.first, one.second);
  });
  return uses;
}
/// A block is freed: its own stream may use the memory again at once, others only if recorded. Returns what is wrong.
inline std::string freed(const Block& block, int streams) {
  std::lock_guard<std::mutex> lock(g_mutex);
  auto uses = block.reads;
  if (block.writer >= 0) uses[block.writer] = std::max(uses[block.writer], block.written);
  auto& clock = g_streams[block.home];
  for (auto& [key, count] : uses)
    if (key != block.home && !block.recorded.count(key) && !knows(clock, key, count) && !knows(g_host, key, count))
      return "memory of " + name(block.home, streams) + " is freed while " + name(key, streams) +
          " may use it, and record_stream was not called";
  return "";
}
}  // namespace order
