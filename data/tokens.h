// data/tokens.h - text or token files in, micro-batches out (tokens.cpp). A corpus is two streams of tokens:
// one to train on, and one that is held out for validation.
//
// The tokens of a text are its bytes (vocabulary 256), without a byte order mark at its beginning.
//
// Token files have llm.c's format: a header of 256 int32 (magic, version, number of tokens), then uint16
// (magic 20240520) or uint32 (magic 20240801). Two things are ours:
//   - In uint32 the highest bit marks a token that does not count as a target, for example one of a user's
//     question.
//   - The fourth word of the header is the --seq of packed conversations; 0 for text.
// A file tokenizer.bin beside the token files (vocabulary.h) says what the tokens mean. data/tokenize.py
// writes token files and tokenizer.bin.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data_files.h"
#include "vocabulary.h"

namespace coat {

class MappedFile;  // files.h

// -----------------------------------------------------------------------------------------------------------
// Streams of tokens

// A sequence of tokens that lie in several places in memory, such as files. Copies share the memory.
class TokenStream {
public:
    // Tokens that lie one after the other in memory, at any alignment.
    struct Source {
        std::shared_ptr<const void> owner;  // keeps the tokens in memory
        const uint8_t* data;
        int width;                         // the bytes of a token: 1, 2 or 4, little-endian
        int64_t count;                     // the number of tokens
        const MappedFile* file = nullptr;  // the owner, if it is a file. The file must not become shorter
    };
    int64_t size() const { return size_; }
    void append(const Source& source);
    void append(const TokenStream& other);
    TokenStream take_end(int64_t count);  // removes the last `count` tokens, and returns them

    // Copies tokens [first, first + count). as_targets[i] is tokens[i], or NO_TARGET if this token does not
    // count as a target.
    void read(int64_t first, int64_t count, int32_t* tokens, int32_t* as_targets) const;

    struct Summary {
        int64_t largest = -1;  // the largest token; -1 if there are none
        uint64_t hash = 0;     // of all tokens in their order, and of whether each counts
    };
    // Reads all tokens and remembers the largest. If read() finds a larger token later, that is an Error.
    Summary scan();

private:
    struct Part {
        Source source;
        int64_t first;  // where its tokens begin in the stream
    };
    std::vector<Part>::const_iterator part_of(int64_t token) const;
    std::vector<uint32_t> raw_tokens(int64_t first, int64_t count) const;

    std::vector<Part> parts_;
    int64_t size_ = 0;
    int64_t largest_ = INT32_MAX;
};

// -----------------------------------------------------------------------------------------------------------
// The data of a run

struct Corpus {
    TokenStream train, validation;
    TokenStream::Summary train_summary, validation_summary;
    std::string held_out_rule;      // by which rule `validation` was chosen, as it is printed
    Vocabulary vocabulary;          // without pieces if token files come without tokenizer.bin
    std::string vocabulary_file;    // that tokenizer.bin; empty without one, and of text files
    int64_t seq = 0;                // of packed conversations; 0 for text
    bool tokens_are_bytes = false;  // the tokens are the bytes of text files
    std::vector<DataFile> files;    // the files that were read, in this order
    std::vector<LeftOut> left_out;
    std::string tokenizer_folder;  // the folder of token files that also has a tokenizer; empty: none
};

struct CorpusOptions {
    // Files and folders that are held out, as --val names them. Empty: by the rules of load_corpus().
    std::string val{};
    // Files and folders that the run itself writes: these are no data.
    std::vector<std::string> output_paths{};
    // The files of the run that is continued: other files are new, and left out. Empty in a new run.
    std::vector<DataFile> files_of_resumed_run{};
    // The largest number of bytes of text that are copied into memory. Text that is copied may change on the
    // disk during the run. Text beyond this number is read from the disk when it is needed.
    int64_t copied_bytes = int64_t{1} << 30;
};

// Reads the data of a run. data: text files, folders of them, or token files, separated by commas
// (data_files.h). What is held out for validation, without options.val:
// - of token files, those with the word val, valid or validation in their names, but not train or training;
//   a word ends where no letter follows: code_val_000001.bin is held out, medieval.bin is not;
// - of 20 or more texts, every 20th;
// - the last tenth of all tokens, if by these rules nothing or everything would be held out.
// With options.val the rest of the data is trained on, which may be nothing.
// Error if a file is missing or damaged, if there is no text to hold out, or if memory has no room for it.
Corpus load_corpus(const std::string& data, const CorpusOptions& options = {});

// -----------------------------------------------------------------------------------------------------------
// Micro-batches

// Divides a stream into windows of T + 1 tokens that overlap by one token, and returns the windows in a
// random order, which differs between epochs. The order is a function of the seed and the epoch, so there is
// no state to save.
class Loader {
public:
    // Error if the stream has fewer windows than a micro-batch has sequences. The message has `purpose`.
    Loader(TokenStream stream, int64_t B, int64_t T, uint64_t seed,
           const std::string& purpose = "to train on");
    int64_t windows() const { return windows_; }  // in an epoch
    // Micro-batch `number` of the run. tokens, targets: (B, T). The target of a token is the token that
    // follows it, or NO_TARGET.
    void read(int64_t number, int32_t* tokens, int32_t* targets) const;

private:
    TokenStream stream_;
    int64_t B_, T_, windows_;
    uint64_t seed_;
};

}  // namespace coat
