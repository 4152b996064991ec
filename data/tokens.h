// data/tokens.h - text or token files in, micro-batches out (tokens.cpp).
//
// A corpus is two streams of tokens: one to train on, one held out for validation. Text is read as bytes
// (vocabulary 256). Token files have llm.c's format: uint16 (magic 20240520) or uint32 (magic 20240801). A
// file NAME.mask beside NAME.bin has a byte for each token: 0 if it does not count as a target, else 1.
// Without --data the corpus is the C and C++ headers of the compiler that built the program: every machine
// that can build it has them.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>
#include <nlohmann/json_fwd.hpp>

namespace coat {

class InputFile;  // file.h

// Consecutive tokens of an array in memory or of a file.
struct TokenSource {
    std::shared_ptr<const void> memory;  // null: a file
    std::shared_ptr<const InputFile> file;
    int64_t start;                                    // byte of the first token of the array or file
    int width;                                        // bytes of a token: 1, 2 or 4
    int64_t first, count;                             // tokens [first, first + count) of the array or file
    std::shared_ptr<const InputFile> mask = nullptr;  // a byte for each token; null: every token counts
    int64_t largest = INT64_MAX;                      // token; TokenStream finds it
};

// The tokens of sources, one after the other. Copies and parts share the memory or the open file.
class TokenStream {
public:
    TokenStream() = default;
    // Reads all tokens once, for the largest. A read is an Error if the file was changed since: if it became
    // shorter, or has a larger token.
    explicit TokenStream(TokenSource source);
    int64_t size() const { return count_; }
    void read(int64_t first, int64_t count, int32_t* tokens) const;
    void mask(int64_t first, int64_t count, int32_t* targets) const;  // NO_TARGET where the mask is 0
    bool masked() const;
    TokenStream part(int64_t first, int64_t count) const;
    void append(const TokenStream& other);
    int64_t largest() const;  // token (of a part: of the whole), as an unsigned value; -1 if there are none

private:
    template <class Use>
    void for_each_source(int64_t first, int64_t count, Use use) const;
    std::vector<TokenSource> sources_;
    int64_t count_ = 0;
};

// Turns tokens into text and back. pieces[t] are the bytes of token t; none if it has no text.
class Vocabulary {
public:
    static Vocabulary bytes();                        // token t is the byte t
    static Vocabulary read(const std::string& path);  // vocabulary.json of data/tokenize.py
    static Vocabulary of(const nlohmann::json& table, const std::string& path);  // path: for errors
    int64_t size() const { return static_cast<int64_t>(pieces_.size()); }
    bool empty() const { return pieces_.empty(); }
    bool operator==(const Vocabulary& o) const { return pieces_ == o.pieces_ && special_ == o.special_; }
    std::string decode(const std::vector<int32_t>& tokens) const;  // a token without text becomes <17>
    std::vector<int32_t> encode(const std::string& text) const;    // longest piece first; Error if none fits
    // Bytes of the text that these tokens stand for; special tokens stand for none. -1 if the table does not
    // say which tokens are special.
    int64_t text_bytes(const int32_t* tokens, int64_t n) const;

private:
    std::vector<std::string> pieces_;
    std::vector<bool> special_;  // empty if not known
};

struct Corpus {
    TokenStream train, validation;
    Vocabulary vocabulary;      // empty if token files have no vocabulary.json: then no samples are printed
    int64_t tokens_in_use = 0;  // one more than the largest token; the model's vocabulary is at least this
    std::string description;    // one line: which data, how many files, how many tokens
};

// data: "" for the compiler's headers; otherwise text files, folders of them, or token files (*.bin), by
// commas. Token files with "val" but not "train" in their names are held out. If there are none, the last
// tenth is. Of text, every 20th file is held out, or the last tenth if there are fewer. Error if a file is
// missing, empty or damaged, or if two token files have different vocabularies.
Corpus load_corpus(const std::string& data);

// Cuts a stream into windows of T + 1 tokens that overlap by one token, and returns them in a random order,
// another in each epoch. The order is a function of (seed, epoch), so that two values say where to resume.
class Loader {
public:
    struct Position {
        int64_t epoch = 0, window = 0;
    };
    // Error if the stream has fewer tokens than one batch needs.
    Loader(TokenStream stream, int64_t B, int64_t T, uint64_t seed);
    // (B, T) each. A target is the token that follows, or NO_TARGET if the mask does not count it.
    void next(int32_t* tokens, int32_t* targets);
    void skip(int64_t batches) { at_ += batches * B_; }  // as next(), without reading
    int64_t windows_without_target() const;              // of an epoch: those in which no target counts
    int64_t windows() const { return windows_; }         // in an epoch
    Position position() const { return {at_ / windows_, at_ % windows_}; }
    void seek(Position p);  // Error if the data have no such window

private:
    int64_t window(int64_t at) const;  // of the stream: the one that comes at this place of the order
    TokenStream stream_;
    int64_t B_, T_, windows_;
    int64_t at_ = 0;  // the next place of the order, counted over all epochs
    uint64_t seed_;
};

}  // namespace coat
