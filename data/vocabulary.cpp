// data/vocabulary.cpp - bytes and llm.c's tokenizer file (vocabulary.h).
#include "vocabulary.h"

#include <cstring>

#include "files.h"

namespace coat {

std::string Vocabulary::decode(const std::vector<int32_t>& tokens) const {
    std::string text;
    for (int32_t t : tokens) {
        const bool known = t >= 0 && t < size() && !pieces[size_t(t)].empty();
        text += known ? pieces[size_t(t)] : concat("<", t, ">");
    }
    return text;
}

Vocabulary byte_vocabulary() {
    Vocabulary v;
    for (int byte = 0; byte < 256; byte++) v.pieces.emplace_back(1, char(byte));
    return v;
}

// The file has a header of 256 int32, and for each token a byte with its length, and its bytes.
Vocabulary read_vocabulary(const std::string& path) {
    constexpr int64_t HEADER = 256 * 4;
    constexpr int32_t MAGIC = 20240328;
    const MappedFile file(path);
    int32_t header[4] = {};  // magic, version, number of tokens; in version 2 the token that ends a text
    if (file.bytes() >= HEADER) std::memcpy(header, file.data(), sizeof header);
    Vocabulary v;
    const uint8_t* const end = file.data() + file.bytes();
    const uint8_t* at = header[0] == MAGIC ? file.data() + HEADER : end;
    while (at < end && *at < end - at) {
        v.pieces.emplace_back(reinterpret_cast<const char*>(at + 1), *at);
        at += 1 + *at;
    }
    if (v.pieces.empty() || at != end || v.size() != header[2])
        throw Error(path, " is not a whole tokenizer file of llm.c; write it again with data/tokenize.py.");
    if (header[1] == 2) v.end_token = header[3];
    return v;
}

}  // namespace coat
