#include "handlers/failed_runs.h"

#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "peer/workspace.h"

namespace entwine {
namespace {

// The runs that failed last: nothing tells when the last device of a run has asked.
constexpr size_t kMostRuns = 64;

struct FailedRuns {
  std::mutex mutex;
  std::map<int64_t, std::string> words;  // by run, whose ids grow
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
  auto& of_run = failed_runs().words;
  std::string& told = of_run[run.run_id];
  if (told.empty() || !knows_less) told = words;
  if (of_run.size() > kMostRuns) of_run.erase(of_run.begin());
}

void throw_noted_failure(xla::ffi::RunId run) {
  const std::lock_guard lock(failed_runs().mutex);
  const auto& words = failed_runs().words;
  if (const auto found = words.find(run.run_id); found != words.end()) {
    throw std::runtime_error(found->second);
  }
}

}  // namespace entwine
