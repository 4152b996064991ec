// data/vocabulary.h - the tokens of a model as text, and text as tokens (vocabulary.cpp). A model that is
// trained on text files has a token for each byte. Token files come with tokenizer.bin, llm.c's file: it has
// the bytes of each token (magic 20240328). Other tokenizers, as Hugging Face stores them, are Python's.
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

    // Whether each byte is one token, as in GPT-2, Llama 3 and Qwen. Only then encode() can be used. (In a
    // vocabulary of SentencePiece, as Llama 2 has it, the numbers of tokens do not tell the order of merges.)
    bool is_byte_level() const;
    // The tokens of a text by byte pair encoding. Added tokens such as <|endoftext|> do not come from text.
    std::vector<int32_t> encode(const std::string& text) const;
};

Vocabulary byte_vocabulary();                         // 256 tokens
Vocabulary read_vocabulary(const std::string& path);  // llm.c's file; Error if it is not whole

}  // namespace coat
