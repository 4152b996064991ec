// token_files.h - token files, vocabularies and token streams, for the tests of data/tokens.cpp.
#pragma once
#include "../data/tokens.h"
#include "files.h"
#include "random.h"

namespace coat::test::token_files {

inline std::vector<int32_t> tokens_of(const TokenStream& stream) {
    std::vector<int32_t> tokens(stream.size());
    stream.read(0, stream.size(), tokens.data());
    return tokens;
}

template <class Token>
TokenStream stream_of(const std::vector<Token>& tokens) {
    const auto memory = std::make_shared<const std::vector<Token>>(tokens);
    return TokenStream(
        {{memory, memory->data()}, nullptr, 0, sizeof(Token), 0, static_cast<int64_t>(tokens.size())});
}

// A token file in llm.c's format: a header of 256 words (magic number, version, count, zeros), then the
// tokens.
template <class Token>
std::string token_file(const std::vector<Token>& tokens, int32_t version = 1) {
    int32_t header[256] = {sizeof(Token) == 2 ? 20240520 : 20240801, version,
                           static_cast<int32_t>(tokens.size())};
    std::string file(reinterpret_cast<const char*>(header), sizeof header);
    return file.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
}

// The same file with another value in word `index` of its header.
inline std::string with_word(std::string file, size_t index, int32_t value) {
    return file.replace(index * 4, 4, reinterpret_cast<const char*>(&value), 4);
}

inline std::string table(const std::string& pieces, const std::string& size) {
    return R"({"format": "coat vocabulary", "version": 1, "size": )" + size + R"(, "pieces": )" + pieces +
           "}";
}

inline void check_data_error(const std::string& data, const std::string& who) {
    INFO("--data ", data);
    check_error([&] { load_corpus(data); }, who);
}

}  // namespace coat::test::token_files
