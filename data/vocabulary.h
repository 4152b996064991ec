// data/vocabulary.h - the tokens of a model as text (vocabulary.cpp). A model that is trained on text files
// has a token for each byte. Token files come with tokenizer.bin, llm.c's file (magic 20240328): it has the
// bytes of each token. It does not say how text is cut into tokens: that takes the tokenizer itself, in
// Python.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace coat {

struct Vocabulary {
    std::vector<std::string> pieces;  // the bytes of each token; empty if they are not known
    int32_t end_token = -1;           // the token that ends a text or an answer; -1 if it is not known

    int64_t size() const { return int64_t(pieces.size()); }
    std::string decode(const std::vector<int32_t>& tokens) const;  // a token that is not known becomes <17>
};

Vocabulary byte_vocabulary();                         // 256 tokens
Vocabulary read_vocabulary(const std::string& path);  // llm.c's file; Error if it is not whole

}  // namespace coat
