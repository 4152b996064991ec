// data/tokens.h - text or token files in, micro-batches out (tokens.cpp). A corpus is two streams of tokens:
// one to train on, one held out for validation. Text is read as bytes (vocabulary 256). Token files have
// llm.c's format: a header of 256 int32 (magic, version, number of tokens), then uint16 (magic 20240520) or
// uint32 (magic 20240801). Two things are ours: in uint32 the highest bit marks a token that does not count
// as a target, say of a user's question, and the fourth word of the header is the --seq of packed
// conversations, 0 for text. A file tokenizer.bin beside them (vocabulary.h) says what their tokens mean.
// data/tokenize.py writes all of these.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "vocabulary.h"

namespace coat {

class MappedFile;  // safetensors.h

// Tokens, such as those of several files, one after the other. Copies share the memory.
class TokenStream {
public:
    // Consecutive tokens in memory, at any alignment.
    struct Source {
        std::shared_ptr<const void> owner;  // keeps them in memory
        const uint8_t* data;
        int width;  // bytes of a token: 1, 2 or 4
        int64_t count;
        const MappedFile* file = nullptr;  // the owner, if it is a file: it must not become shorter
    };
    int64_t size() const { return size_; }
    void append(const Source& source);
    void append(const TokenStream& other) {
        for (const Source& s : other.sources_) append(s);
    }
    TokenStream take_end(int64_t count);  // removes the last `count` tokens, and returns them
    // Targets are the same tokens, or NO_TARGET where they do not count.
    void read(int64_t first, int64_t count, int32_t* tokens, int32_t* targets) const;

    struct Facts {
        int64_t largest = -1;  // token; -1 if there are none
        uint64_t hash = 0;     // of every token and of whether it counts, in this order
    };
    Facts facts();  // reads all tokens once; from then on a larger one is an Error of read()

private:
    std::vector<uint32_t> words(int64_t first, int64_t count) const;
    std::vector<Source> sources_;
    int64_t size_ = 0, largest_ = INT32_MAX;
};

struct Corpus {
    TokenStream train, validation;
    Vocabulary vocabulary;        // without pieces if token files come without tokenizer.bin
    std::string vocabulary_file;  // that tokenizer.bin; empty without one, and of text files
    int64_t seq = 0;              // of packed conversations; 0 for text
    bool bytes = false;           // the tokens are the bytes of text files
};

// data: text files, folders of them (without checkpoints), or token files (*.bin), by commas. Token files
// with "val" but not "train" in their names are held out, and every 20th of 20 or more texts; if nothing is,
// the last tenth of all tokens. Error if a file is missing or damaged, or if there is no text.
Corpus load_corpus(const std::string& data);

// Cuts a stream into windows of T + 1 tokens that overlap by one token, and returns them in a random order,
// another in each epoch. The order is a function of the seed and the epoch: there is no state to save.
class Loader {
public:
    // Error if the stream has fewer tokens than one batch needs.
    Loader(TokenStream stream, int64_t B, int64_t T, uint64_t seed);
    int64_t windows() const { return windows_; }  // in an epoch
    // Micro-batch `number` of the run: (B, T) each. A target is the token that follows, or NO_TARGET.
    void read(int64_t number, int32_t* tokens, int32_t* targets) const;

private:
    TokenStream stream_;
    int64_t B_, T_, windows_;
    uint64_t seed_;
};

}  // namespace coat
