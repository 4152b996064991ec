// data/tokens.cpp - text and token files become streams of tokens, streams become micro-batches (tokens.h).
#include "tokens.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <exception>
#include <map>
#include <new>
#include <set>

#include "../common/model.h"
#include "files.h"
#include "tokenizer_files.h"

namespace coat {

constexpr uint32_t NOT_COUNTED = 1u << 31;  // the bit of a token that does not count in the loss

void TokenStream::append(const Source& source) {
    if (source.count == 0) return;
    parts_.push_back({source, size_});
    size_ += source.count;
}

void TokenStream::append(const TokenStream& other) {
    for (const Part& part : other.parts_) append(part.source);
}

TokenStream TokenStream::take_end(int64_t count) {
    std::vector<Source> taken;  // the last one comes first
    while (count > 0) {
        Source& last = parts_.back().source;
        Source end = last;
        end.count = std::min(count, last.count);
        last.count -= end.count;
        end.data += last.count * last.width;
        taken.push_back(end);
        size_ -= end.count;
        count -= end.count;
        if (last.count == 0) parts_.pop_back();
    }
    TokenStream stream;
    for (auto source = taken.rbegin(); source != taken.rend(); ++source) stream.append(*source);
    return stream;
}

// The part that has this token; the end if there is none.
std::vector<TokenStream::Part>::const_iterator TokenStream::part_of(int64_t token) const {
    if (token >= size_) return parts_.end();
    const auto is_before = [](int64_t t, const Part& part) { return t < part.first; };
    return std::upper_bound(parts_.begin(), parts_.end(), token, is_before) - 1;
}

// Tokens as they are in token files, with the bit NOT_COUNTED.
std::vector<uint32_t> TokenStream::raw_tokens(int64_t first, int64_t count) const {
    std::vector<uint32_t> all(count);
    const int64_t end = first + count;
    auto part = part_of(first);
    for (int64_t token = first; token < end; ++part) {
        const Source& source = part->source;
        const int64_t part_end = std::min(end, part->first + source.count);
        const uint8_t* from = source.data + (token - part->first) * source.width;
        std::vector<uint8_t> bytes;
        if (source.file) {
            bytes.resize((part_end - token) * source.width);
            source.file->copy(from, std::ssize(bytes), bytes.data());
            from = bytes.data();
        }
        for (; token < part_end; token++) {
            std::memcpy(&all[token - first], from, source.width);  // both are little-endian
            from += source.width;
        }
    }
    return all;
}

void TokenStream::read(int64_t first, int64_t count, int32_t* tokens, int32_t* as_targets) const {
    for (uint32_t raw_token : raw_tokens(first, count)) {
        const int32_t token = raw_token & ~NOT_COUNTED;
        if (token > largest_)
            throw Error("--data was changed during the run, and now has token ", token, "; restore it.");
        *tokens++ = token;
        *as_targets++ = raw_token & NOT_COUNTED ? NO_TARGET : token;
    }
}

// All threads work, each on some parts of the stream. The hash does not depend on where files end.
TokenStream::Summary TokenStream::scan() {
    constexpr int64_t TOKENS_OF_PART = 1 << 18;
    int64_t largest = -1;
    uint64_t hash = size_;
    // What a thread has thrown: an exception must not leave the parallel loop.
    std::exception_ptr error;
#pragma omp parallel for reduction(max : largest) reduction(^ : hash)
    for (int64_t first = 0; first < size_; first += TOKENS_OF_PART) {
        try {
            const std::vector<uint32_t> part = raw_tokens(first, std::min(TOKENS_OF_PART, size_ - first));
            hash ^= hash_bytes(part.data(), std::ssize(part) * 4, first);
            for (const uint32_t raw_token : part)
                largest = std::max<int64_t>(largest, raw_token & ~NOT_COUNTED);
        } catch (...) {
#pragma omp critical
            error = std::current_exception();
        }
    }
    if (error) std::rethrow_exception(error);
    largest_ = largest;
    return {.largest = largest, .hash = hash};
}

const std::string NEW_FILE = "is new, and the run goes on with the files that it began with";
const std::string SAME_TEXT = "has the same text as ";

namespace {

// Says whether a file belongs to the run. A run that is continued has the files that it began with.
class KnownFiles {
public:
    explicit KnownFiles(const std::vector<DataFile>& files) {
        for (const DataFile& file : files) {
            paths_.insert(utf8_path(file.path));
            path_of_hash_.emplace(file.hash, file.path);
        }
    }
    bool has(const std::string& path) const { return paths_.empty() || paths_.count(utf8_path(path)); }
    // Why a file that the run does not have is left out: the run left it out from the beginning, as a copy of
    // one of its files, or the file is new.
    std::string why_left_out(uint64_t hash) const {
        const auto same = path_of_hash_.find(hash);
        return same == path_of_hash_.end() ? NEW_FILE : SAME_TEXT + same->second;
    }

private:
    std::set<std::string> paths_;
    std::map<uint64_t, std::string> path_of_hash_;
};

}  // namespace

// The tokens of a text, which are its bytes: a copy of them, or the memory of the mapped file.
static TokenStream::Source source_of_text(const std::shared_ptr<const MappedFile>& file, bool copied) {
    constexpr std::string_view BYTE_ORDER_MARK = "\xEF\xBB\xBF";
    std::string_view text = file->text();
    if (text.starts_with(BYTE_ORDER_MARK)) text.remove_prefix(BYTE_ORDER_MARK.size());
    TokenStream::Source source{
        .owner = file,
        .data = reinterpret_cast<const uint8_t*>(text.data()),
        .width = 1,
        .count = int64_t(text.size()),
        .file = file.get(),
    };
    if (!copied) return source;
    const auto copy = std::make_shared<const std::string>(text);
    source.owner = copy;
    source.data = reinterpret_cast<const uint8_t*>(copy->data());
    source.file = nullptr;
    return source;
}

// Reads text files. A text that occurs twice is used once: its copy would make validation easier than it is.
static void read_texts(const FoundFiles& found, const CorpusOptions& options, Corpus& corpus) {
    constexpr size_t HELD_OUT_EVERY = 20;  // if there are at least 20 texts, every 20th is held out
    const KnownFiles known(options.files_of_resumed_run);
    std::map<uint64_t, std::string> path_of_hash;
    std::vector<LeftOut> copies;
    std::vector<TokenStream::Source> texts;  // that --val does not name
    int64_t copied_bytes = 0;
    for (size_t i = 0; i < found.paths.size(); i++) {
        const std::string& path = found.paths[i];
        const auto file = std::make_shared<const MappedFile>(path);
        const std::string reason = why_not_text(file->text());
        const uint64_t hash = hash_of(*file);
        if (file->bytes() == 0) continue;
        if (!reason.empty()) {
            corpus.left_out.push_back({path, reason});
        } else if (!known.has(path)) {
            corpus.left_out.push_back({path, known.why_left_out(hash)});
        } else if (const auto [other, is_first] = path_of_hash.emplace(hash, path); !is_first) {
            copies.push_back({path, SAME_TEXT + other->second});
        } else {
            const bool copied = copied_bytes + file->bytes() <= options.copied_bytes;
            if (copied) copied_bytes += file->bytes();
            const TokenStream::Source text = source_of_text(file, copied);
            if (i < found.held_out_count) corpus.validation.append(text);
            else texts.push_back(text);
            corpus.files.push_back({path, file->bytes(), hash});
        }
    }
    const bool by_number = options.val.empty() && texts.size() >= HELD_OUT_EVERY;
    for (size_t i = 0; i < texts.size(); i++) {
        const bool is_held_out = by_number && i % HELD_OUT_EVERY == HELD_OUT_EVERY / 2;
        (is_held_out ? corpus.validation : corpus.train).append(texts[i]);
    }
    corpus.left_out.insert(corpus.left_out.end(), copies.begin(), copies.end());
    corpus.held_out_rule = "every 20th file";
    corpus.vocabulary = byte_vocabulary();
    corpus.tokens_are_bytes = true;
}

constexpr int64_t HEADER = 256 * 4;  // bytes
constexpr int32_t MAGIC_16_BIT = 20240520, MAGIC_32_BIT = 20240801;

// Takes the vocabulary beside a token file. All token files must have the same vocabulary.
static void take_vocabulary(const std::string& path, Corpus& corpus) {
    const Vocabulary found = read_vocabulary(path);
    if (corpus.vocabulary_file.empty()) corpus.vocabulary = found;
    if (found.pieces != corpus.vocabulary.pieces)
        throw Error("--data has token files of another tokenizer than ", path,
                    "; make all of them with one tokenizer (data/tokenize.py).");
    corpus.vocabulary.end_token = found.end_token;
    corpus.vocabulary_file = path;
}

// Whether one of the words of a file's name is one of these.
static bool has_word(const std::string& name, std::initializer_list<std::string_view> words) {
    std::string word;
    for (const char c : name + ".") {
        if (std::isalpha(uint8_t(c))) {
            word += c;
        } else {
            if (std::find(words.begin(), words.end(), word) != words.end()) return true;
            word.clear();
        }
    }
    return false;
}

static bool is_held_out_by_name(const std::string& path) {
    const std::string name = fs::path(path).filename().string();
    return has_word(name, {"val", "valid", "validation"}) && !has_word(name, {"train", "training"});
}

static void read_token_file(const std::string& path, bool is_held_out, Corpus& corpus) {
    const auto file = std::make_shared<const MappedFile>(path);
    int32_t header[4] = {};  // magic, version, number of tokens, --seq
    if (file->bytes() >= HEADER) std::memcpy(header, file->data(), sizeof header);
    const auto [magic, version, count, seq] = header;
    const bool wide = magic == MAGIC_32_BIT;
    const int width = wide ? 4 : 2;
    const bool known_version = version == 1 || (wide && version == 7);  // llm.c's first with 32 bits was 7
    const bool known = (wide || magic == MAGIC_16_BIT) && known_version && seq >= 0;
    if (!known || file->bytes() != HEADER + int64_t{count} * width)
        throw Error(path, " is not a whole token file; write it again with data/tokenize.py, and give ",
                    "either token files (*.bin) or texts, not both.");
    if (corpus.train.size() + corpus.validation.size() == 0) corpus.seq = seq;
    if (seq != corpus.seq)
        throw Error(path, " has windows of ", seq, " tokens, and other files have ", corpus.seq,
                    " (0: text); give files of one kind.");
    TokenStream& stream = is_held_out ? corpus.validation : corpus.train;
    // A packed file ends with one token more than its windows, the last target, which does not count. The
    // next file begins in its place.
    if (seq && stream.size()) stream.take_end(1);
    stream.append(
        {.owner = file, .data = file->data() + HEADER, .width = width, .count = count, .file = file.get()});
    corpus.files.push_back({path, file->bytes(), hash_of(*file)});
    const std::string beside = fs::path(path).replace_filename("tokenizer.bin").string();
    if (beside != corpus.vocabulary_file && fs::exists(beside)) take_vocabulary(beside, corpus);
}

// Reads the files: the token files if there are any, else the texts.
static void read_files(const FoundFiles& found, const CorpusOptions& options, Corpus& corpus) {
    if (std::none_of(found.paths.begin(), found.paths.end(), is_token_file))
        return read_texts(found, options, corpus);
    corpus.held_out_rule = "files with the word val in their names";
    const KnownFiles known(options.files_of_resumed_run);
    for (size_t i = 0; i < found.paths.size(); i++) {
        const std::string& path = found.paths[i];
        const bool is_held_out = options.val.empty() ? is_held_out_by_name(path) : i < found.held_out_count;
        if (known.has(path)) read_token_file(path, is_held_out, corpus);
        else corpus.left_out.push_back({path, NEW_FILE});
    }
    std::set<std::string> folders;
    for (const DataFile& file : corpus.files) folders.insert(folder_of(file.path));
    const auto with_tokenizer = std::find_if(folders.begin(), folders.end(), [](const std::string& folder) {
        return !tokenizer_in(folder).empty();
    });
    if (with_tokenizer != folders.end()) corpus.tokenizer_folder = *with_tokenizer;
}

// If by these rules no file is held out, or every file is, the last tenth of all tokens is held out.
static void hold_out_end(Corpus& corpus) {
    if (corpus.train.size() && corpus.validation.size()) return;
    corpus.held_out_rule = "the last tenth";
    corpus.train.append(corpus.validation);
    int64_t stays = corpus.train.size() - ceil_div(corpus.train.size(), 10);
    if (corpus.seq)
        stays = stays / corpus.seq * corpus.seq;  // so that the validation part begins with a window
    corpus.validation = corpus.train.take_end(corpus.train.size() - stays);
}

Corpus load_corpus(const std::string& data, const CorpusOptions& options) {
    const FoundFiles found = find_data_files(data, options.output_paths, options.val);
    Corpus corpus;
    corpus.left_out = found.left_out;
    try {
        read_files(found, options, corpus);
    } catch (const std::bad_alloc&) {
        throw Error("--data ", data,
                    " does not fit into memory; turn it into token files, which are read from ",
                    "the disk (python3 data/tokenize.py), or give a part of it.");
    }
    if (options.val.empty()) hold_out_end(corpus);
    else corpus.held_out_rule = "--val " + options.val;
    corpus.train_summary = corpus.train.scan();
    corpus.validation_summary = corpus.validation.scan();
    if (corpus.validation.size()) return corpus;
    std::string why;
    for (const LeftOut& file : corpus.left_out) {
        if (why.size() > 500) break;
        why += concat(why.empty() ? ": " : ", ", file.path, " ", file.reason);
    }
    throw Error(options.val.empty() ? "--data " + data : "--val " + options.val, " has no text", why,
                "; give text files in UTF-8, folders of them, or token files (*.bin).");
}

// The finalizer of splitmix64: it maps numbers one to one, and every bit of z changes about half of the
// result. (mixed_bits() in common/random.h is cheaper. Neither replaces the other: that would change the
// order of data or the rounding of runs that are continued.)
static uint64_t splitmix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// Element i of a random permutation of [0, n), without a table. A Feistel network permutes [0, 4^half_bits),
// whatever its round function is. It is applied again until the result is below n.
static int64_t permute(uint64_t key, int64_t n, int64_t i) {
    constexpr uint64_t ROUNDS = 6;
    int half_bits = 1;
    while (int64_t{1} << 2 * half_bits < n) half_bits++;
    const uint64_t mask = (uint64_t{1} << half_bits) - 1;
    int64_t x = i;
    do {
        for (uint64_t round = 0; round < ROUNDS; round++) {
            const uint64_t left = x >> half_bits, right = x & mask;
            const uint64_t of_right = splitmix64(key + splitmix64((round << 32) + right)) & mask;
            x = right << half_bits | (left ^ of_right);
        }
    } while (x >= n);
    return x;
}

Loader::Loader(TokenStream stream, int64_t B, int64_t T, uint64_t seed, const std::string& purpose)
    : stream_(std::move(stream)), B_(B), T_(T), windows_((stream_.size() - 1) / T), seed_(seed) {
    if (windows_ < B)
        throw Error("--data has ", with_noun(stream_.size(), "token"), " ", purpose, ", too few for ",
                    with_noun(B, "sequence"), " of --seq ", T, "; give more text, or a smaller ",
                    B > 1 ? "--batch or --seq." : "--seq.");
}

void Loader::read(int64_t number, int32_t* tokens, int32_t* targets) const {
    std::vector<int32_t> window(T_ + 1), as_targets(T_ + 1);  // see TokenStream::read()
    for (int64_t row = 0; row < B_; row++) {
        const int64_t drawn_before = number * B_ + row;  // windows, in all epochs
        const uint64_t epoch = drawn_before / windows_;
        const uint64_t key = splitmix64(seed_ + 0x9E3779B97F4A7C15ull * (epoch + 1));
        const int64_t first = permute(key, windows_, drawn_before % windows_) * T_;
        stream_.read(first, T_ + 1, window.data(), as_targets.data());
        std::copy(window.begin(), window.end() - 1, tokens + row * T_);
        std::copy(as_targets.begin() + 1, as_targets.end(), targets + row * T_);
    }
}

}  // namespace coat
