// data/vocabulary.cpp - bytes and llm.c's tokenizer file (vocabulary.h).
#include "vocabulary.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string_view>
#include <unordered_map>

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

bool Vocabulary::is_byte_level() const {
    std::array<int, 256> count{};
    for (const std::string& piece : pieces)
        if (piece.size() == 1) count[uint8_t(piece[0])]++;
    return std::all_of(count.begin(), count.end(), [](int n) { return n == 1; });
}

namespace {

enum class CharacterKind : uint8_t { Space, Letter, Digit, Other };

}  // namespace

static CharacterKind kind_of(char c) {
    const auto byte = uint8_t(c);
    if (byte >= 0x80) return CharacterKind::Letter;
    if (std::strchr(" \t\n\v\f\r", c) && c) return CharacterKind::Space;
    if (c >= '0' && c <= '9') return CharacterKind::Digit;
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ? CharacterKind::Letter : CharacterKind::Other;
}

// The length of the first word of a text, as GPT-2's pattern cuts it. No token crosses the end of a word. The
// pattern:
//     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// Characters beyond ASCII count as letters here, which most of them are. If one is no letter, the word is
// longer than GPT-2's, but its tokens are the same, because no token has both kinds.
static size_t first_word(std::string_view text) {
    for (const std::string_view end : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
        if (text.starts_with(end)) return end.size();
    const size_t space = text[0] == ' ' && text.size() > 1 ? 1 : 0;
    const CharacterKind first = kind_of(text[space]);
    size_t end = space;
    if (first != CharacterKind::Space) {
        while (end < text.size() && kind_of(text[end]) == first) end++;
        return end;
    }
    while (end < text.size() && kind_of(text[end]) == CharacterKind::Space) end++;
    if (end == text.size() || end == 1) return end;
    return end - 1;  // the last space belongs to the word that follows
}

// The tokens of one word, appended to `tokens`. At first each byte is a part of its own. Again and again, two
// neighbours that together are a token are joined: of all such pairs the one whose token has the smallest
// number, because byte pair encoding has numbered its tokens in the order in which it learned them.
static void encode_word(std::string_view word, const std::unordered_map<std::string_view, int32_t>& token_of,
                        std::vector<int32_t>& tokens) {
    std::vector<size_t> begins(word.size() + 1);  // where the parts of the word begin, and where it ends
    std::iota(begins.begin(), begins.end(), size_t(0));
    const auto part = [&](size_t i, size_t parts) {
        return word.substr(begins[i], begins[i + parts] - begins[i]);
    };
    for (;;) {
        size_t best = 0;  // the part that will be joined with the next one
        int32_t smallest = INT32_MAX;
        for (size_t i = 0; i + 2 < begins.size(); i++) {
            const auto found = token_of.find(part(i, 2));
            if (found == token_of.end() || found->second >= smallest) continue;
            best = i;
            smallest = found->second;
        }
        if (smallest == INT32_MAX) break;
        begins.erase(begins.begin() + int64_t(best) + 1);
    }
    for (size_t i = 0; i + 1 < begins.size(); i++) tokens.push_back(token_of.at(part(i, 1)));
}

std::vector<int32_t> Vocabulary::encode(const std::string& text) const {
    std::unordered_map<std::string_view, int32_t> token_of;
    for (size_t t = 0; t < pieces.size(); t++) token_of.emplace(pieces[t], int32_t(t));
    std::vector<int32_t> tokens;
    for (std::string_view rest = text; !rest.empty();) {
        const std::string_view word = rest.substr(0, first_word(rest));
        rest.remove_prefix(word.size());
        encode_word(word, token_of, tokens);
    }
    return tokens;
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
