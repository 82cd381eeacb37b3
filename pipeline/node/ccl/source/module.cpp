// The backend's Python interface: create a group, stop before the process ends, and the library's version.
#include <torch/csrc/utils/pybind.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <future>
#include "group.hpp"

// oneCCL's log level. oneCCL sets it from the environment too late: it has already warned of every variable by then.
extern int oneccl_log_level __asm__("_ZN10ccl_logger5levelE") __attribute__((weak));

namespace manycpu {
namespace {
constexpr auto kKey = "oneccl";
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Kvs = ccl::shared_ptr_class<ccl::kvs>;

// oneCCL's own key-value store, where the ranks meet: rank 0 opens it, and publishes its address in torch's store.
Kvs meeting_point(c10d::Store& store, int rank) {
  if (rank == 0) {
    auto kvs = ccl::create_main_kvs();
    const auto address = kvs->get_address();
    store.set(kKey, std::vector<uint8_t>(address.begin(), address.end()));
    return kvs;
  }
  const auto bytes = store.get(kKey);
  ccl::kvs::address_type address{};
  TORCH_CHECK(bytes.size() == address.size(), "ccl: rank 0 uses another version of oneCCL");
  std::copy(bytes.begin(), bytes.end(), address.begin());
  return ccl::create_kvs(address);
}

// Creating a communicator blocks until all ranks have come. It runs in a thread, so that the caller can time out.
std::unique_ptr<Comm> connected(const StorePtr& store, int rank, int size, Milliseconds timeout, Peers& peers) {
  auto promise = std::make_shared<std::promise<Comm*>>();
  auto result = promise->get_future();
  std::thread([=] {
    try {
      promise->set_value(new Comm{ccl::create_communicator(size, rank, meeting_point(*store, rank)), nullptr});
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  const auto deadline = Clock::now() + timeout;
  while (result.wait_for(Milliseconds(20)) != std::future_status::ready) {
    peers.listen();
    if (const auto news = peers.fault()) std::rethrow_exception(failure("ccl: " + news->text));
    if (Clock::now() > deadline) {
      std::rethrow_exception(failure(c10::str("ccl: Timed out waiting ", timeout.count(), "ms for the ranks to connect")));
    }
  }
  return std::unique_ptr<Comm>(result.get());
}

BackendPtr create(
    const StorePtr& store, int rank, int size, Milliseconds timeout, Milliseconds patience, std::vector<int> connections,
    std::vector<std::string> names, std::optional<int> memory, BackendPtr gloo) {
  static std::once_flag once;
  std::call_once(once, [] {
    const char* level = std::getenv("CCL_LOG_LEVEL");
    if (&oneccl_log_level && level && std::string(level) == "error") oneccl_log_level = 0;
    ccl::init();
  });
  auto peers = std::make_shared<Peers>(rank == 0, std::move(connections), std::move(names));
  if (memory && size > Shared::kMostRanks) {
    ::close(*memory);
    memory.reset();
  }
  auto shared = memory ? std::make_unique<Shared>(*memory, rank, size) : nullptr;
  auto comm = connected(store, rank, size, patience, *peers);
  comm->shared = std::move(shared);
  auto line = std::make_shared<Line>(std::move(comm), std::move(peers), rank, size);
  gloo->setTimeout(timeout);
  return c10::make_intrusive<Group>(rank, size, timeout, std::move(line), std::move(gloo));
}

void stop() {
  const char* transport = std::getenv("CCL_ATL_TRANSPORT");
  Engine::get().stop(transport && std::string(transport) == "mpi");
}

std::tuple<unsigned, unsigned, unsigned> version() {
  const auto found = ccl::get_library_version();
  return {found.major, found.minor, found.update};
}
}  // namespace
}  // namespace manycpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using released = py::call_guard<py::gil_scoped_release>;
  m.def("create", &manycpu::create, released());
  m.def("stop", &manycpu::stop, released());
  m.def("version", &manycpu::version);
  m.attr("PART") = manycpu::Shared::kPart;
}
