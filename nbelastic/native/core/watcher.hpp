// Breaks the segment when the process of a peer is gone.
#pragma once

#include <thread>
#include <vector>

#include "team.hpp"

namespace nbelastic {

struct Peer {
    std::uint32_t rank;
    int socket;   // connected to it; closed by the watcher
    int process;  // a pidfd, or -1; a socket may be held open by children of the peer
};

// A thread that sleeps until something happens to a peer, or the watch is over.
class Watcher {
public:
    explicit Watcher(Team& team) : team_(team) {}
    ~Watcher() { stop(); }
    Watcher(const Watcher&) = delete;
    Watcher& operator=(const Watcher&) = delete;

    // Takes connected sockets over.
    void start(const std::vector<std::pair<std::uint32_t, int>>& sockets);
    void stop();

private:
    void watch();
    void drop(Peer& peer);

    Team& team_;
    std::vector<Peer> peers_;
    int stop_ = -1;
    std::thread thread_;
};

}  // namespace nbelastic
