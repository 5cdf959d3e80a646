#include "handlers/failed_runs.h"

#include <algorithm>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>

#include "peer/workspace.h"

namespace entwine {
namespace {

// The runs that failed last: nothing tells when the last device of a run has asked.
constexpr size_t kMostRuns = 64;

struct FailedRun {
  int64_t id;
  std::string words;
};

struct FailedRuns {
  std::mutex mutex;
  std::deque<FailedRun> runs;  // in the order in which they failed: XLA's ids have none

  std::string* find(int64_t id) {
    const auto found = std::ranges::find(runs, id, &FailedRun::id);
    return found == runs.end() ? nullptr : &found->words;
  }
};

// Never destroyed: threads of XLA may outlive statics.
FailedRuns& failed_runs() {
  static auto* instance = new FailedRuns;
  return *instance;
}

}  // namespace

void note_failure(xla::ffi::RunId run, const std::function<void()>& body) {
  std::string words;
  bool knows_less = false;
  try {
    return body();
  } catch (const PeerFailed& error) {
    words = error.what();
    knows_less = true;
  } catch (const std::exception& error) {
    words = error.what();
  }
  const std::lock_guard lock(failed_runs().mutex);
  if (std::string* told = failed_runs().find(run.run_id)) {
    if (!knows_less) *told = words;
    return;
  }
  auto& runs = failed_runs().runs;
  runs.push_back({run.run_id, words});
  if (runs.size() > kMostRuns) runs.pop_front();
}

void throw_noted_failure(xla::ffi::RunId run) {
  const std::lock_guard lock(failed_runs().mutex);
  if (const std::string* told = failed_runs().find(run.run_id)) throw std::runtime_error(*told);
}

}  // namespace entwine
