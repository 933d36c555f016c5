#include "watcher.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace nbelastic {
namespace {

int process_behind(int socket) {
#if defined(SYS_pidfd_open)
    ucred its{};
    socklen_t length = sizeof its;
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &its, &length) == 0 && its.pid > 0) {
        return static_cast<int>(syscall(SYS_pidfd_open, its.pid, 0));
    }
#endif
    return -1;
}

// Whether the other end of a socket that has something to say is gone.
bool hung_up(int socket) {
    char rest[64];
    for (;;) {
        const ssize_t n = recv(socket, rest, sizeof rest, MSG_DONTWAIT);
        if (n > 0) continue;
        return n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
    }
}

}  // namespace

void Watcher::start(const std::vector<std::pair<std::uint32_t, int>>& sockets) {
    for (const auto& [rank, socket] : sockets) {
        peers_.push_back({rank, socket, process_behind(socket)});
    }
    stop_ = eventfd(0, EFD_CLOEXEC);
    if (stop_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    thread_ = std::thread([this] { watch(); });
}

void Watcher::stop() {
    if (thread_.joinable()) {
        const std::uint64_t one = 1;
        [[maybe_unused]] const ssize_t written = write(stop_, &one, sizeof one);
        thread_.join();
    }
    for (Peer& peer : peers_) drop(peer);
    peers_.clear();
    if (stop_ >= 0) close(stop_);
    stop_ = -1;
}

void Watcher::drop(Peer& peer) {
    if (peer.socket >= 0) close(peer.socket);
    if (peer.process >= 0) close(peer.process);
    peer.socket = peer.process = -1;
}

void Watcher::watch() {
    for (;;) {
        std::vector<pollfd> watched{{stop_, POLLIN, 0}};
        for (const Peer& peer : peers_) {  // what is -1, poll() leaves out
            watched.push_back({peer.socket, POLLIN, 0});
            watched.push_back({peer.process, POLLIN, 0});
        }
        if (poll(watched.data(), watched.size(), -1) < 0 && errno != EINTR) return;
        if (watched[0].revents != 0) return;
        for (std::size_t i = 0; i < peers_.size(); ++i) {
            Peer& peer = peers_[i];
            const bool ended = watched[2 + 2 * i].revents != 0;
            const bool closed = watched[1 + 2 * i].revents != 0 && hung_up(peer.socket);
            if (!ended && !closed) continue;
            if (!team_.has_left(peer.rank)) {
                team_.abort("the process of rank " + std::to_string(peer.rank) +
                            " of this host is gone");
            }
            drop(peer);
        }
    }
}

}  // namespace nbelastic
