// data/tokens.h - text and token files in, micro-batches out (tokens.cpp).
//
// A corpus is two streams of tokens, one to train on and one held out. Text is read as bytes (vocabulary 256); llm.c's token
// files hold uint16 (magic 20240520) or uint32 (magic 20240801). With no --data the corpus is the C and C++ headers of the
// compiler that built the program, and CUDA's where present: text that every machine which can build this has.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace coat {

class InputFile;  // file.h

// Tokens of one, two or four bytes each, in memory or in files. Copies and parts share the memory or the open file.
class TokenStream {
public:
    TokenStream() = default;
    TokenStream(std::shared_ptr<const void> memory, int width, int64_t count);
    TokenStream(std::shared_ptr<const InputFile> file, int64_t at, int width, int64_t count);  // from byte `at` on
    int64_t size() const { return count_; }
    int32_t operator[](int64_t i) const;
    void read(int64_t first, int64_t count, int32_t* tokens) const;  // Error if the file has become shorter
    void prefetch(int64_t first, int64_t count) const;               // a hint that these tokens are read soon
    TokenStream part(int64_t first, int64_t count) const;
    void append(const TokenStream& other);  // data sets come in many files
    int64_t largest() const;                // of all tokens, read as unsigned; -1 if there are none

private:
    struct Segment {
        std::shared_ptr<const void> memory;     // either this
        std::shared_ptr<const InputFile> file;  // or this
        int64_t at;                             // byte of the first token
        int width;
        int64_t first, count;                   // the tokens [first, first + count) of the stream
    };
    const Segment* segment(int64_t i) const;
    std::vector<Segment> segments_;
    int64_t count_ = 0;
};

// Turns tokens into text and back: pieces[t] are the bytes of token t, none if it has no text. Bytes are their own pieces.
class Vocabulary {
public:
    static Vocabulary bytes();
    static Vocabulary read(const std::string& path);  // vocabulary.json, which data/tokenize.py writes beside its token files
    int64_t size() const { return static_cast<int64_t>(pieces_.size()); }
    std::string decode(const std::vector<int32_t>& tokens) const;       // a token without a piece shows as <17>
    std::vector<int32_t> encode(const std::string& text) const;         // longest piece first; Error where no piece fits
    bool empty() const { return pieces_.empty(); }

private:
    std::vector<std::string> pieces_;
};

struct Corpus {
    TokenStream train, validation;
    Vocabulary vocabulary;      // empty if a token file has no table beside it: samples are then not printed, and train.cpp says so
    int64_t tokens_in_use = 0;  // what the model's vocabulary must hold: one more than the largest token; 256 for text
    std::string description;    // one line for the start-up table: what, how many files, how many tokens
};

// data: "" for the compiler's headers, or paths separated by commas: text files, folders of them, or token files (*.bin).
// Token files with val in their names, as llm.c's have, are held out; where there are none it is the last tenth. Their table is
// vocabulary.json in the folder of the first.
// Throws Error on a missing, empty, truncated or wrong-magic file.
Corpus load_corpus(const std::string& data);

// Cuts a stream into windows of T + 1 tokens that overlap by one and hands them out in the order of a permutation, a new one
// each epoch. The order is a function of (seed, epoch), so the position is two numbers and resumes exactly.
class Loader {
public:
    struct Position {
        int64_t epoch = 0, window = 0;
    };
    Loader(TokenStream stream, int64_t B, int64_t T, uint64_t seed, bool shuffle);  // Error if fewer tokens than one batch
    void next(int32_t* tokens, int32_t* targets);  // (B, T) each
    void prefetch(int64_t batches) const;          // a hint that so many batches are asked for soon
    int64_t windows() const { return windows_; }
    Position position() const { return position_; }
    void seek(Position p);  // Error if these data have no such window

private:
    int64_t window(Position p) const;   // which one comes at this position
    Position after(Position p) const;
    TokenStream stream_;
    int64_t B_, T_, windows_;
    uint64_t seed_;
    bool shuffle_;
    Position position_;
};

}  // namespace coat
