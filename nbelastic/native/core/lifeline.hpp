// Detection of a process's death before its memory is freed.
//
// The system closes a dead process's sockets, and reports its end, only when it has freed its
// memory, the later the more there was. It unlocks what the threads held locked before (robust
// futexes). So each rank has a thread that holds a word of its seat, and waits for that of the next
// rank, which breaks the segment for all. All ranks can read there which are dead.
// See https://www.kernel.org/doc/html/latest/locking/robust-futexes.html.
#pragma once

#include <future>
#include <thread>
#include <vector>

#include "team.hpp"

namespace nbelastic {

class Lifeline {
public:
    Lifeline(Team& team, Segment& segment) : team_(team), segment_(segment) {}
    ~Lifeline() { stop(); }
    Lifeline(const Lifeline&) = delete;
    Lifeline& operator=(const Lifeline&) = delete;

    // Returns when the thread holds the word. Throws std::system_error where the system refuses.
    void start();
    void stop();

    // The ranks whose processes have ended without leaving.
    std::vector<std::uint32_t> dead() const;

private:
    void hold(std::promise<void> held);
    void watch();
    bool is_dead(std::uint32_t rank) const noexcept;
    Word& word_of_next() const noexcept;

    Team& team_;
    Segment& segment_;
    std::atomic<bool> stopped_{false};
    std::thread thread_;
};

}  // namespace nbelastic
