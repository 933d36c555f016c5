// Messages from one rank to another, through a ring in the segment for each direction.
#pragma once

#include <vector>

#include "collectives.hpp"

namespace nbelastic {

// Sends pieces as one message, and returns when the last byte is in the ring. One thread at a time
// for each direction.
void send(Team& team, const std::vector<Piece>& pieces, std::uint32_t to);

// Receives a message, which must be of this length.
void receive(Team& team, std::byte* data, std::size_t bytes, std::uint32_t source);

}  // namespace nbelastic
