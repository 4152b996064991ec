// data/tokens.cpp - text and token files become streams of tokens, streams become micro-batches (tokens.h).
#include "tokens.h"

#include <cstring>
#include <set>
#include <sstream>

#include "../model.h"
#include "safetensors.h"

namespace coat {

constexpr uint32_t NOT_COUNTED = 1u << 31;

void TokenStream::append(const Source& source) {
    if (source.count) sources_.push_back(source);
    size_ += source.count;
}

TokenStream TokenStream::take_end(int64_t count) {
    TokenStream begin, end;
    for (const Source& s : sources_) {
        const int64_t stays = std::min(size_ - count - begin.size_, s.count);
        begin.append({s.owner, s.data, s.width, stays, s.file});
        end.append({s.owner, s.data + stays * s.width, s.width, s.count - stays, s.file});
    }
    *this = begin;
    return end;
}

std::vector<uint32_t> TokenStream::words(int64_t first, int64_t count) const {
    std::vector<uint32_t> all(count);
    uint32_t* word = all.data();
    for (const Source& s : sources_) {
        const int64_t end = std::min(first + count, s.count);
        for (int64_t i = std::max<int64_t>(first, 0); i < end; i++)
            std::memcpy(word++, s.data + i * s.width, s.width);  // little-endian, as the files
        first -= s.count;                                        // counted from the next source on
    }
    return all;
}

void TokenStream::read(int64_t first, int64_t count, int32_t* tokens, int32_t* targets) const {
    for (const Source& s : sources_)
        if (s.file) s.file->require_whole();
    for (uint32_t word : words(first, count)) {
        *tokens = int32_t(word & ~NOT_COUNTED);
        if (*tokens > largest_)
            throw Error("--data was changed during the run, and now has token ", *tokens, "; restore it.");
        *targets++ = word & NOT_COUNTED ? NO_TARGET : *tokens;
        tokens++;
    }
}

// All threads work, each on some parts of the stream. The hash does not depend on where files end.
TokenStream::Facts TokenStream::facts() {
    constexpr int64_t PART = 1 << 18;
    int64_t largest = -1;
    auto hash = uint64_t(size_);
#pragma omp parallel for reduction(max : largest) reduction(^ : hash)
    for (int64_t first = 0; first < size_; first += PART) {
        const std::vector<uint32_t> part = words(first, std::min(PART, size_ - first));
        hash ^= hash_bytes(part.data(), part.size() * 4, first);
        for (uint32_t word : part) largest = std::max<int64_t>(largest, word & ~NOT_COUNTED);
    }
    largest_ = largest;
    return {largest, hash};
}

namespace {

bool is_token_file(const std::string& path) { return ends_with(path, ".bin"); }

// The files that --data names. Of a folder, in the byte order of their paths: its token files, or all files
// below it that are not hidden, nor in a checkpoint. A link that leads nowhere, or to itself, is not a file.
std::vector<std::string> files_of(const std::string& data) {
    std::vector<std::string> all;
    std::set<std::string> seen;  // a file that is named twice is read once
    std::istringstream list(data);
    for (std::string item; std::getline(list, item, ',');) {
        std::error_code none;
        const bool folder = fs::is_directory(item, none);
        for (const char* records : {".jsonl", ".json", ".parquet"})
            if (!folder && ends_with(item, records))
                throw Error("--data ", item, " has records, not text; make token files of it: ",
                            "python3 data/tokenize.py --tokenizer FOLDER --seq 2048 --out tokens ", item,
                            " (conversations; texts without --seq).");
        std::vector<std::string> files;
        if (!folder) files = {item};
        const auto unreadable = fs::directory_options::skip_permission_denied;
        for (fs::recursive_directory_iterator at(item, unreadable, none), end; at != end; ++at)
            if (at->path().filename().string()[0] == '.' ||
                fs::exists(at->path() / "model.safetensors", none))
                at.disable_recursion_pending();
            else if (at->is_regular_file(none)) files.push_back(at->path().string());
        std::sort(files.begin(), files.end());
        const auto others = std::stable_partition(files.begin(), files.end(), is_token_file);
        if (others != files.begin()) files.erase(others, files.end());
        for (const std::string& file : files)
            if (!ends_with(file, "tokenizer.bin") && seen.insert(file).second) all.push_back(file);
    }
    return all;
}

// A text that occurs twice is used once: its copy would make validation easier. NUL bytes are no text.
void read_texts(const std::vector<std::string>& files, Corpus& c) {
    constexpr size_t HELD_OUT = 20;  // every 20th
    std::vector<std::string> texts;
    std::set<uint64_t> seen;  // hashes
    for (const std::string& path : files) {
        const MappedFile file(path);
        const bool is_text = file.bytes() && file.text().find('\0') == std::string_view::npos;
        if (is_text && seen.insert(hash_bytes(file.data(), file.bytes(), 0)).second)
            texts.emplace_back(file.text());
    }
    const auto train = std::make_shared<std::string>(), validation = std::make_shared<std::string>();
    for (size_t i = 0; i < texts.size(); i++)
        *(texts.size() >= HELD_OUT && i % HELD_OUT == HELD_OUT / 2 ? validation : train) += texts[i];
    for (const auto& [text, stream] : {std::pair{train, &c.train}, {validation, &c.validation}})
        stream->append({text, reinterpret_cast<const uint8_t*>(text->data()), 1, int64_t(text->size())});
    c.vocabulary = byte_vocabulary();
    c.bytes = true;
}

constexpr int64_t HEADER = 256 * 4;  // bytes
constexpr int32_t MAGIC_16_BIT = 20240520, MAGIC_32_BIT = 20240801;

// All token files must have one vocabulary.
void take_vocabulary(const std::string& path, Corpus& c) {
    const Vocabulary found = read_vocabulary(path);
    if (c.vocabulary_file.empty()) c.vocabulary = found;
    if (found.pieces != c.vocabulary.pieces)
        throw Error("--data has token files of another tokenizer than ", path,
                    "; make all of them with one tokenizer (data/tokenize.py).");
    c.vocabulary.end_token = found.end_token;
    c.vocabulary_file = path;
}

void read_token_file(const std::string& path, Corpus& c) {
    const auto file = std::make_shared<const MappedFile>(path);
    int32_t header[4] = {};  // magic, version, number of tokens, --seq
    if (file->bytes() >= HEADER) std::memcpy(header, file->data(), sizeof header);
    const bool wide = header[0] == MAGIC_32_BIT;
    const int width = wide ? 4 : 2;
    const int64_t count = header[2], seq = header[3];
    if (!(wide || header[0] == MAGIC_16_BIT) || file->bytes() != HEADER + count * width ||
        !(header[1] == 1 || (wide && header[1] == 7)) || seq < 0)  // llm.c's first version with 32 bits is 7
        throw Error("--data ", path, " is not a whole token file, as others are; give files of one kind, or ",
                    "write it again with data/tokenize.py.");
    if (c.train.size() + c.validation.size() == 0) c.seq = seq;
    if (seq != c.seq)
        throw Error("--data ", path, " has windows of ", seq, " tokens, and other files have ", c.seq,
                    " (0: text); give files of one kind.");
    const std::string name = fs::path(path).filename().string();
    const bool held_out = name.find("val") != std::string::npos && name.find("train") == std::string::npos;
    TokenStream& stream = held_out ? c.validation : c.train;
    // The token after a packed file's last window is no target that counts: the next file begins there.
    if (seq && stream.size()) stream.take_end(1);
    stream.append({file, file->data() + HEADER, width, count, file.get()});
    const std::string beside = fs::path(path).replace_filename("tokenizer.bin").string();
    if (fs::exists(beside)) take_vocabulary(beside, c);
}

}  // namespace

Corpus load_corpus(const std::string& data) {
    Corpus c;
    const std::vector<std::string> files = files_of(data);
    if (std::none_of(files.begin(), files.end(), is_token_file)) read_texts(files, c);
    else
        for (const std::string& path : files) read_token_file(path, c);
    if (!c.train.size() || !c.validation.size()) {
        c.train.append(c.validation);
        int64_t stays = c.train.size() - ceil_div(c.train.size(), 10);
        if (c.seq) stays = stays / c.seq * c.seq;  // so that the held-out part begins with a window
        c.validation = c.train.take_end(c.train.size() - stays);
    }
    if (!c.validation.size())
        throw Error("--data ", data,
                    " has no text; give text files, folders of them, or token files (*.bin).");
    return c;
}

static uint64_t mix(uint64_t z) {  // splitmix64's finalizer
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// Element i of a random permutation of [0, n), without a table. A Feistel network permutes [0, 4^half),
// whatever its round function; it is applied again until the result is below n.
static int64_t permute(uint64_t key, int64_t n, int64_t i) {
    constexpr uint64_t ROUNDS = 6;
    int half = 1;
    while (int64_t{1} << 2 * half < n) half++;
    const uint64_t mask = (uint64_t{1} << half) - 1;
    uint64_t x = i;
    do
        for (uint64_t round = 0; round < ROUNDS; round++) {
            const uint64_t left = x >> half, right = x & mask;
            x = right << half | (left ^ (mix(key + mix((round << 32) + right)) & mask));
        }
    while (x >= uint64_t(n));
    return int64_t(x);
}

Loader::Loader(TokenStream stream, int64_t B, int64_t T, uint64_t seed)
    : stream_(std::move(stream)), B_(B), T_(T), windows_((stream_.size() - 1) / T), seed_(seed) {
    if (windows_ < B)
        throw Error("--data has ", stream_.size(), " tokens to train on or held out, too few for --batch ", B,
                    " and --seq ", T, "; give more text, or a smaller --batch or --seq.");
}

void Loader::read(int64_t number, int32_t* tokens, int32_t* targets) const {
    std::vector<int32_t> both(T_ + 1), counted(T_ + 1);
    for (int64_t at = number * B_; at < (number + 1) * B_; at++, tokens += T_, targets += T_) {
        const uint64_t key = mix(seed_ + 0x9E3779B97F4A7C15ull * uint64_t(at / windows_ + 1));
        stream_.read(permute(key, windows_, at % windows_) * T_, T_ + 1, both.data(), counted.data());
        std::copy(both.begin(), both.end() - 1, tokens);
        std::copy(counted.begin() + 1, counted.end(), targets);
    }
}

}  // namespace coat
