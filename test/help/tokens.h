// tokens.h - token files, tokenizer files and token streams, for the tests of data/.
#pragma once
#include "../../data/tokens.h"
#include "files.h"
#include "random.h"

namespace coat::test {

inline std::vector<int32_t> tokens_of(const TokenStream& stream) {
    std::vector<int32_t> tokens(stream.size()), targets(stream.size());
    stream.read(0, stream.size(), tokens.data(), targets.data());
    return tokens;
}
template <class Token> TokenStream stream_of(const std::vector<Token>& tokens) {
    const auto memory = std::make_shared<const std::vector<Token>>(tokens);
    TokenStream stream;
    const auto* bytes = reinterpret_cast<const uint8_t*>(memory->data());
    stream.append({memory, bytes, sizeof(Token), int64_t(tokens.size())});
    return stream;
}

// The header of llm.c's files: 256 words, of which the first few mean something.
inline std::string file_header(std::vector<int32_t> words) {
    words.resize(256);
    return {reinterpret_cast<const char*>(words.data()), 1024};
}
template <class Token>
std::string token_file(const std::vector<Token>& tokens, int32_t seq = 0, int32_t version = 1) {
    const int32_t magic = sizeof(Token) == 2 ? 20240520 : 20240801;
    return file_header({magic, version, int32_t(tokens.size()), seq})
        .append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
}
// end: the token that ends a text; -1: a file of version 1, which has none.
inline std::string tokenizer_file(const std::vector<std::string>& pieces, int32_t end = -1) {
    std::string file = file_header({20240328, end < 0 ? 1 : 2, int32_t(pieces.size()), end});
    for (const std::string& piece : pieces) file += char(piece.size()) + piece;
    return file;
}

}  // namespace coat::test
