// What tests ask of the stand-in devices and learn about them: errors on request, contexts, host waits, and the memory
// that all processes of a machine use together.
#pragma once

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <iomanip>
#include <sstream>

namespace watch {
constexpr int kDevices = 16;

/// A child has no use for the devices, nor the threads and locks that free memory.
inline bool g_forked = false;

// ---- The observer: a Python function of (what, name, device), called for a device's first context, for host waits
// while these are traced, and for every kernel while faults are planned. It returns "oom" to have an allocation fail.
inline PyObject* g_observer = nullptr;
inline std::atomic<bool> g_tracing{false}, g_faults{false};
inline std::atomic<int64_t> g_waits{0};
inline std::atomic<int> g_sync_mode{0};  // of torch.cuda.set_sync_debug_mode

inline std::string ask(const char* what, const std::string& name, int device) {
  if (g_observer == nullptr || g_forked || !Py_IsInitialized()) return "";
  py::gil_scoped_acquire gil;
  try {
    auto answer = py::reinterpret_borrow<py::object>(g_observer)(what, name, device);
    return answer.is_none() ? "" : answer.cast<std::string>();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("the stand-in's observer");
    return "";
  }
}

// ---- Contexts and sticky errors.
struct Error {
  int code;
  std::string text;
};
inline std::array<std::atomic<bool>, kDevices> g_opened{};
inline std::array<std::atomic<Error*>, kDevices> g_broken{};

inline void open(int device) {
  if (!g_opened[device].exchange(true)) ask("context", "", device);
}
/// Any call that needs the device's context. After a sticky error, each of them raises it.
inline void touch(int device) {
  open(device);
  if (auto error = g_broken[device].load())
    throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, error->code, error->text);
}
/// A kernel or an allocation. Returns what the observer wants done with it.
inline std::string launch(const char* name, int device) {
  touch(device);
  return g_faults.load(std::memory_order_relaxed) ? ask("kernel", name, device) : "";
}
/// The host waits for a device. ``counted``: torch's sync debug mode counts it, too.
inline void wait(const char* name, int device, bool counted = true) {
  touch(device);
  ++g_waits;
  if (g_tracing) ask("wait", name, device);
  if (counted && g_sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
  TORCH_CHECK(!counted || g_sync_mode != 2, "called a synchronizing CUDA operation");
}

// ---- Memory: of this process, and of all that share a state folder.
struct Slot {
  std::atomic<int64_t> pid, used, held_until;  // the last one in ns of CLOCK_MONOTONIC; 0 while the process lives
};
constexpr int kSlots = 256;
inline std::array<Slot*, kDevices> g_shared{}, g_mine{};
inline int64_t g_held_ns = 0;  // memory of a process that was killed is held for so long after it was first missed

inline int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}
inline bool dead(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return true;
  auto state = line.find_last_of(')') + 2;
  return state < line.size() && (line[state] == 'Z' || line[state] == 'X');
}
inline void share(int device, const std::string& path) {
  auto file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  TORCH_CHECK(file >= 0 && ftruncate(file, sizeof(Slot) * kSlots) == 0, "stand-in: cannot share ", path);
  auto at = mmap(nullptr, sizeof(Slot) * kSlots, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  TORCH_CHECK(at != MAP_FAILED, "stand-in: cannot map ", path);
  g_shared[device] = static_cast<Slot*>(at);
  for (int i = 0; i < kSlots && !g_mine[device]; ++i)
    if (int64_t none = 0; g_shared[device][i].pid.compare_exchange_strong(none, getpid()))
      g_mine[device] = &g_shared[device][i];
}
inline void mind_forks() {
  pthread_atfork(nullptr, nullptr, [] { g_forked = true, g_mine.fill(nullptr); });
}
inline void unshare() {
  for (auto& mine : g_mine)
    if (auto slot = std::exchange(mine, nullptr)) slot->used = 0, slot->pid = 0;
}
/// Bytes that other processes use on the device.
inline int64_t others(int device) {
  int64_t sum = 0;
  for (int i = 0; g_shared[device] && i < kSlots; ++i) {
    auto& slot = g_shared[device][i];
    auto pid = slot.pid.load();
    if (pid == 0 || &slot == g_mine[device]) continue;
    if (dead(pid)) {
      int64_t none = 0;
      slot.held_until.compare_exchange_strong(none, monotonic_ns() + g_held_ns);
      if (slot.held_until <= monotonic_ns()) {
        slot.used = 0, slot.held_until = 0, slot.pid = 0;
        continue;
      }
    }
    sum += slot.used;
  }
  return sum;
}
inline std::string size_of(int64_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2);
  if (bytes <= 1024) text << bytes << " bytes";
  else if (bytes <= 1 << 20) text << bytes / 1024.0 << " KiB";
  else if (bytes <= 1 << 30) text << bytes / 1048576.0 << " MiB";
  else text << bytes / 1073741824.0 << " GiB";
  return text.str();
}
[[noreturn]] inline void out_of_memory(int device, int64_t size, int64_t total, int64_t used, int64_t others) {
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size_of(size), ". GPU ", device,
      " has a total capacity of ", size_of(total), " of which ", size_of(std::max<int64_t>(0, total - used - others)),
      " is free. ", others ? "Other processes have " + size_of(others) + " memory in use. " : std::string(),
      "Including non-PyTorch memory, this process has ", size_of(used), " memory in use. Of the allocated memory ",
      size_of(used), " is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. If reserved but "
      "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
      "  See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)");
  abort();
}
}  // namespace watch
