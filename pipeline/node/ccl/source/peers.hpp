// Detect ranks that have died: rank 0 has a connection to each other rank, whose only messages are that a rank
// leaves (B), that all have left (A), or that the group has failed (F). The kernel closes a connection when its
// process dies, however it dies. Rank 0 forwards messages to the others.
#pragma once
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>
#include "work.hpp"

namespace manycpu {
class Peers {
 public:
  // Rank 0 has a connection to each other rank, the others have one to rank 0; `names` are those at the other ends.
  Peers(bool is_first, std::vector<int> connections, std::vector<std::string> names) : is_first_(is_first) {
    for (size_t k = 0; k < connections.size(); ++k) links_.push_back({connections[k], names.at(k)});
    remember(connections);
  }

  ~Peers() { hang_up(); }
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  struct News {
    std::string text;
    Clock::time_point since;
  };

  std::vector<int> descriptors() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<int> open;
    for (const auto& link : links_) {
      if (link.descriptor >= 0) open.push_back(link.descriptor);
    }
    return open;
  }

  void listen() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& link : links_) read(link);
  }

  // The group cannot work any more: a rank has died or failed.
  std::optional<News> fault() { return copy(fault_); }
  // A rank has left in order: complete collectives stay complete, and others cannot complete any more.
  std::optional<News> departure() { return copy(departure_); }

  void tell_of_fault(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!fault_) note(fault_, text);
    send_all('F', text, nullptr);
  }

  void say_goodbye() {
    std::lock_guard<std::mutex> lock(mutex_);
    send_all('B', "", nullptr);
  }

  enum class Parting { waiting, together, alone };

  // After the goodbye: whether all other ranks have said theirs and are still connected, so that all leave together.
  Parting parting() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (have_all_left_) return Parting::together;
    if (fault_ || is_alone_) return Parting::alone;
    if (!is_first_ && !links_.empty()) return Parting::waiting;
    for (const auto& link : links_) {
      if (!link.left) return Parting::waiting;
    }
    send_all('A', "", nullptr);
    have_all_left_ = true;
    return Parting::together;
  }

  void hang_up() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& link : links_) close(link);
  }

 private:
  struct Link {
    int descriptor;
    std::string name;
    bool left = false;
    size_t filled = 0;
    char buffer[256] = {};
  };

  // All messages have the same size, so that the number of bytes shows when one is complete.
  struct Message {
    char kind;
    char text[255];
  };
  static_assert(sizeof(Message) == sizeof(Link::buffer));

  // A forked child (a data loader's worker) must not keep the connections open after its parent has died.
  static std::set<int>& open_ones() {
    static auto* all = new std::set<int>;
    return *all;
  }

  static void remember(const std::vector<int>& connections) {
    static std::once_flag once;
    std::call_once(once, [] {
      pthread_atfork(nullptr, nullptr, [] {
        for (const int descriptor : open_ones()) ::close(descriptor);
      });
    });
    open_ones().insert(connections.begin(), connections.end());
  }

  std::optional<News> copy(const std::optional<News>& news) {
    std::lock_guard<std::mutex> lock(mutex_);
    return news;
  }

  static void note(std::optional<News>& slot, const std::string& text) {
    if (!slot) slot = News{text, Clock::now()};
  }

  static void close(Link& link) {
    if (link.descriptor < 0) return;
    open_ones().erase(link.descriptor);
    ::close(link.descriptor);
    link.descriptor = -1;
  }

  void send_all(char kind, const std::string& text, const Link* except) {
    Message message{kind, {}};
    std::strncpy(message.text, text.c_str(), sizeof(message.text) - 1);
    for (auto& link : links_) {
      if (link.descriptor < 0 || &link == except) continue;
      // It never blocks: there are so few messages that the connection always has room.
      (void)::send(link.descriptor, &message, sizeof(message), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
  }

  void read(Link& link) {
    while (link.descriptor >= 0) {
      const auto got = ::recv(
          link.descriptor, link.buffer + link.filled, sizeof(link.buffer) - link.filled, MSG_DONTWAIT);
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
      if (got <= 0) return lost(link);
      link.filled += static_cast<size_t>(got);
      if (link.filled < sizeof(link.buffer)) continue;
      link.filled = 0;
      Message message;
      std::memcpy(&message, link.buffer, sizeof(message));
      heard(link, message);
    }
  }

  void heard(Link& link, const Message& message) {
    if (message.kind == 'A') {
      have_all_left_ = true;
      return;
    }
    if (message.kind == 'F') {
      note(fault_, message.text);
      send_all('F', message.text, &link);
      return;
    }
    // In a message that rank 0 forwards, the text names the rank that left; else it is the sender itself.
    const std::string name = *message.text ? message.text : link.name;
    if (!*message.text) link.left = true;
    note(departure_, name + " has left the group");
    send_all('B', name, &link);
  }

  void lost(Link& link) {
    close(link);
    is_alone_ = true;
    if (link.left) return;
    const auto text = link.name + " died, or cannot be reached any more";
    note(fault_, text);
    send_all('F', text, &link);
  }

  const bool is_first_;
  bool have_all_left_ = false, is_alone_ = false;
  std::mutex mutex_;
  std::vector<Link> links_;
  std::optional<News> fault_, departure_;
};
}  // namespace manycpu
