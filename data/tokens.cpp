// data/tokens.cpp - text and token files become streams of tokens, and streams become micro-batches
// (tokens.h).
//
// In order: streams, vocabularies, corpora (the compiler's headers, text files, token files), and the loader.
#include "tokens.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include "../model.h"
#include "file.h"
#include "json.h"

#ifndef COAT_HEADERS
#define COAT_HEADERS ""  // the Makefile's list of the compiler's header folders, separated by colons
#endif

namespace coat {
namespace fs = std::filesystem;

// -----------------------------------------------------------------------------------------------------------
// TokenStream

// Tokens of a file may lie at any alignment, so they are copied as bytes.
template <class Token>
static void widen(const uint8_t* bytes, int64_t count, int32_t* tokens) {
    for (int64_t i = 0; i < count; i++) {
        Token token;
        std::memcpy(&token, bytes + i * int64_t(sizeof token), sizeof token);
        tokens[i] = int32_t(token);
    }
}

TokenStream::TokenStream(TokenSource source) : sources_{std::move(source)}, count_(sources_[0].count) {
    int64_t largest = -1;
    std::vector<int32_t> tokens(1 << 16);
    for (int64_t at = 0, n; at < count_; at += n) {
        n = std::min<int64_t>(count_ - at, tokens.size());
        read(at, n, tokens.data());
        for (int64_t i = 0; i < n; i++) largest = std::max<int64_t>(largest, uint32_t(tokens[i]));
    }
    sources_[0].largest = largest;  // a larger one later means that the file was changed
}

// Calls use(source, at, n) for each source that has some of the tokens [first, first + count): those are the
// tokens [at, at + n) of its array or file.
template <class Use>
void TokenStream::for_each_source(int64_t first, int64_t count, Use use) const {
    for (const TokenSource& s : sources_) {
        const int64_t begin = std::max<int64_t>(first, 0), end = std::min(first + count, s.count);
        if (begin < end) use(s, s.first + begin, end - begin);
        first -= s.count;  // counted from the next source on
    }
}

void TokenStream::read(int64_t first, int64_t count, int32_t* tokens) const {
    for_each_source(first, count, [&](const TokenSource& s, int64_t at, int64_t n) {
        const int64_t start = s.start + at * s.width;
        std::vector<uint8_t> buffer(s.file ? n * s.width : 0);
        if (s.file) s.file->read(start, buffer.data(), n * s.width);
        const uint8_t* bytes = s.file ? buffer.data() : static_cast<const uint8_t*>(s.memory.get()) + start;
        (s.width == 1 ? widen<uint8_t> : s.width == 2 ? widen<uint16_t> : widen<uint32_t>)(bytes, n, tokens);
        if (std::any_of(tokens, tokens + n, [&](int32_t t) { return uint32_t(t) > s.largest; }))
            throw Error(s.file->path(), " was overwritten while it was in use; restore the file.");
        tokens += n;
    });
}

bool TokenStream::masked() const {
    return std::any_of(sources_.begin(), sources_.end(), [](const TokenSource& s) { return bool(s.mask); });
}

void TokenStream::mask(int64_t first, int64_t count, int32_t* targets) const {
    for_each_source(first, count, [&](const TokenSource& s, int64_t at, int64_t n) {
        std::vector<uint8_t> counts(n, 1);
        if (s.mask) s.mask->read(at, counts.data(), n);
        for (int64_t i = 0; i < n; i++)
            if (!counts[i]) targets[i] = NO_TARGET;
        targets += n;
    });
}

TokenStream TokenStream::part(int64_t first, int64_t count) const {
    TokenStream result;
    for_each_source(first, count, [&](TokenSource s, int64_t at, int64_t n) {
        s.first = at, s.count = n;
        result.sources_.push_back(std::move(s));
        result.count_ += n;
    });
    return result;
}

void TokenStream::append(const TokenStream& other) {
    sources_.insert(sources_.end(), other.sources_.begin(), other.sources_.end());
    count_ += other.count_;
}

int64_t TokenStream::largest() const {
    int64_t largest = -1;
    for (const TokenSource& s : sources_) largest = std::max(largest, s.largest);
    return largest;
}

// -----------------------------------------------------------------------------------------------------------
// Vocabulary

Vocabulary Vocabulary::bytes() {
    Vocabulary v;
    for (int byte = 0; byte < 256; byte++) v.pieces_.emplace_back(1, char(byte));
    v.special_.assign(256, false);
    return v;
}

Vocabulary Vocabulary::read(const std::string& path) { return of(read_json(path).object, path); }

Vocabulary Vocabulary::of(const nlohmann::json& table, const std::string& path) {
    auto require = [&](bool ok) {
        if (!ok)
            throw Error(path, " is not a vocabulary of version 1; write it again with data/tokenize.py.");
    };
    using nlohmann::json;
    require(table.value("format", json()) == "coat vocabulary" && table.value("version", json()) == 1);
    const json pieces = table.value("pieces", json());
    require(pieces.is_array() && !pieces.empty() && table.value("size", json()) == pieces.size());
    Vocabulary v;
    for (const json& piece : pieces) {
        require(piece.is_string());
        // JSON holds only UTF-8: the code points U+0000 to U+00FF stand for bytes.
        std::string& bytes = v.pieces_.emplace_back();
        const auto& text = piece.get_ref<const std::string&>();
        for (size_t i = 0, length; i < text.size(); i += length) {
            uint32_t point = 0;
            length = utf8_character(text, i, &point);
            require(length && point <= 0xFF);
            bytes += char(point);
        }
    }
    if (!table.contains("special")) return v;
    const json& special = table["special"];
    require(special.is_array());
    v.special_.assign(v.pieces_.size(), false);
    for (const json& token : special) {
        require(token.is_number_unsigned() && token.get<uint64_t>() < v.pieces_.size());
        v.special_[token.get<size_t>()] = true;
    }
    return v;
}

std::string Vocabulary::decode(const std::vector<int32_t>& tokens) const {
    std::string text;
    for (int32_t t : tokens) {
        const bool known = t >= 0 && t < size() && !pieces_[t].empty();
        text += known ? pieces_[t] : concat("<", t, ">");
    }
    return text;
}

int64_t Vocabulary::text_bytes(const int32_t* tokens, int64_t n) const {
    int64_t bytes = special_.empty() ? -1 : 0;
    for (int64_t i = 0; i < n && bytes >= 0; i++)
        if (const auto t = size_t(tokens[i]); t < special_.size() && !special_[t]) bytes += pieces_[t].size();
    return bytes;
}

// Takes the longest piece that the rest of the text begins with, until no text is left.
std::vector<int32_t> Vocabulary::encode(const std::string& text) const {
    // Of equal pieces the last one counts: Llama 2 repeats some bytes.
    std::unordered_map<std::string_view, int32_t> token_of;
    size_t longest = 0;
    for (size_t t = 0; t < pieces_.size(); t++) {
        token_of[pieces_[t]] = int32_t(t);
        longest = std::max(longest, pieces_[t].size());
    }
    std::vector<int32_t> tokens;
    for (size_t at = 0, length; at < text.size(); at += length) {
        const std::string_view rest = std::string_view(text).substr(at, longest);
        length = rest.size();
        while (length && !token_of.count(rest.substr(0, length))) length--;
        if (!length) {
            uint32_t point;  // the message shows the whole character
            const size_t bytes = std::max<size_t>(1, utf8_character(text, at, &point));
            throw Error("The vocabulary has no token for \"", escaped(text.substr(at, bytes)),
                        "\"; give another --prompt.");
        }
        tokens.push_back(token_of.at(rest.substr(0, length)));
    }
    return tokens;
}

// -----------------------------------------------------------------------------------------------------------
// Corpora. Text is read as bytes. Files come in the byte order of their paths, in every locale.

namespace {

constexpr int64_t MIB = 1 << 20;
constexpr int64_t MAX_HEADERS = 32 * MIB;     // of headers in all
constexpr int64_t MAX_HEADER_FILE = MIB / 4;  // larger headers are generated tables, not code
constexpr size_t HELD_OUT_FILE = 20;          // every 20th file is held out,
constexpr int64_t HELD_OUT_PART = 10;         // or the last tenth if there are fewer files

std::vector<std::string> split(const std::string& list, char separator) {
    std::vector<std::string> items;
    std::istringstream stream(list);
    for (std::string item; std::getline(stream, item, separator);)
        if (!item.empty()) items.push_back(item);
    return items;
}

bool is_token_file(const std::string& path) { return ends_with(path, ".bin"); }

// All regular files below a folder that are not hidden, sorted.
std::vector<std::string> files_under(const std::string& folder) {
    std::vector<std::string> paths;
    std::error_code failed;  // an exception of ++ does not name the folder
    fs::recursive_directory_iterator entry(folder, fs::directory_options::skip_permission_denied), end;
    for (; entry != end; entry.increment(failed)) {
        const bool hidden = entry->path().filename().string()[0] == '.';
        std::error_code ignored;  // a link that leads nowhere, or to itself, is not a file
        if (hidden && entry->is_directory(ignored)) entry.disable_recursion_pending();
        if (!hidden && entry->is_regular_file(ignored)) paths.push_back(entry->path().string());
    }
    if (failed)
        throw Error("--data ", folder, " cannot be read (", failed.message(),
                    "); check the disk, or copy the folder.");
    std::sort(paths.begin(), paths.end());
    return paths;
}

// Describes the corpus: "text: 3 files, 900 bytes to train on, 100 held out (the last tenth)". If no part was
// chosen to be held out (null), it is the last tenth of all.
void complete(Corpus& c, const std::string& files, const char* unit, const char* held_out) {
    if (!held_out) {
        c.train.append(c.validation);
        const int64_t end = c.train.size() - ceil_div(c.train.size(), HELD_OUT_PART);
        c.validation = c.train.part(end, c.train.size() - end);
        c.train = c.train.part(0, end);
        held_out = "the last tenth";
    }
    c.description = concat(files, ", ", c.train.size(), " ", unit, " to train on, ", c.validation.size(),
                           " held out (", held_out, ")");
}

bool is_text(const MappedFile& file) {
    return file.bytes() && !std::memchr(file.data(), 0, file.bytes());
}

TokenStream stream_of(std::string text) {
    const auto memory = std::make_shared<const std::string>(std::move(text));
    return TokenStream({{memory, memory->data()}, nullptr, 0, 1, 0, int64_t(memory->size())});
}

// The corpus of the text files among these: all, or those within the limits in bytes. A text that occurs
// twice is used once: a copy of a text that is trained on would make validation easier than it is.
Corpus text_corpus(const std::string& what, const std::vector<std::string>& paths,
                   int64_t max_file = INT64_MAX, int64_t max_total = INT64_MAX) {
    std::vector<std::string> texts;
    std::unordered_set<size_t> seen;  // hashes
    int64_t total = 0;
    for (const std::string& path : paths) {
        const MappedFile file(path);
        if (file.bytes() > max_file || total + file.bytes() > max_total || !is_text(file)) continue;
        std::string text(reinterpret_cast<const char*>(file.data()), file.bytes());
        if (!seen.insert(std::hash<std::string>()(text)).second) continue;
        texts.push_back(std::move(text));
        total += file.bytes();
    }
    const bool by_file = texts.size() >= HELD_OUT_FILE;
    std::string train, validation;
    for (size_t i = 0; i < texts.size(); i++)
        (by_file && i % HELD_OUT_FILE == HELD_OUT_FILE / 2 ? validation : train) += texts[i];
    Corpus c;
    c.train = stream_of(std::move(train));
    c.validation = stream_of(std::move(validation));
    c.vocabulary = Vocabulary::bytes();
    c.tokens_in_use = c.vocabulary.size();
    complete(c, concat(what, ": ", texts.size(), " files"), "bytes", by_file ? "every 20th file" : nullptr);
    return c;
}

Corpus load_headers(const std::string& folders) {
    std::string present;
    std::vector<std::string> paths;
    for (const std::string& folder : split(folders, ':')) {
        if (!fs::is_directory(folder)) continue;
        present += (present.empty() ? "" : ", ") + folder;
        for (const std::string& path : files_under(folder)) paths.push_back(path);
    }
    if (paths.empty())
        throw Error("The compiler's headers are not on this machine (searched in \"", folders,
                    "\"); give text with --data.");
    return text_corpus("C and C++ headers of this machine (" + present + ")", paths, MAX_HEADER_FILE,
                       MAX_HEADERS);
}

// llm.c's token files: a header of 256 int32 (magic, version, number of tokens), then the tokens.
constexpr int32_t MAGIC_16_BIT = 20240520, MAGIC_32_BIT = 20240801;
constexpr int64_t TOKEN_HEADER = 256 * 4;

TokenStream read_token_file(const std::string& path) {
    auto require = [&](bool ok, const auto&... what) {
        if (!ok) throw Error("--data ", path, " ", what..., "; write it again with data/tokenize.py.");
    };
    const auto file = std::make_shared<const InputFile>(path);
    require(file->bytes() >= TOKEN_HEADER, "is truncated: it is shorter than the header of a token file");
    int32_t header[3];
    file->read(0, header, sizeof header);
    const bool wide = header[0] == MAGIC_32_BIT;
    require(wide || header[0] == MAGIC_16_BIT, "is not a token file: its magic number is ", header[0],
            ", not ", MAGIC_16_BIT, " or ", MAGIC_32_BIT);
    require(header[1] == 1 || (wide && header[1] == 7),  // llm.c numbers its first version with 32 bits 7
            "is a token file of the unknown version ", header[1]);
    const int width = wide ? 4 : 2;
    const int64_t count = header[2], bytes = file->bytes() - TOKEN_HEADER;
    require(count > 0, "has no tokens");
    require(bytes == count * width, "is truncated or damaged: ", count, " tokens need ",
            count * width, " bytes, but it has ", bytes);
    TokenSource source{nullptr, file, TOKEN_HEADER, width, 0, count};
    const std::string beside = fs::path(path).replace_extension(".mask").string();
    if (fs::exists(beside)) {
        source.mask = std::make_shared<const InputFile>(beside);
        require(source.mask->bytes() == count, "has ", count, " tokens, but ", beside, " has ",
                source.mask->bytes(), " bytes, one for each token");
    }
    const TokenStream tokens(std::move(source));
    // From here on tokens are int32, and a negative one would mean NO_TARGET.
    require(tokens.largest() <= INT32_MAX, "is damaged: it has token ", tokens.largest());
    return tokens;
}

// Files with "train" in their names, and those with neither name, are trained on.
Corpus load_tokens(const std::string& data, const std::vector<std::string>& paths) {
    Corpus c;
    TokenStream unnamed;
    for (const std::string& path : paths) {
        const std::string name = fs::path(path).filename().string();
        const bool train = name.find("train") != std::string::npos,
                   validation = name.find("val") != std::string::npos;
        (train ? c.train : validation ? c.validation : unnamed).append(read_token_file(path));
    }
    c.train.append(unnamed);
    const bool named = c.train.size() && c.validation.size();
    complete(c, concat(escaped(data), ": ", paths.size(), " token files"), "tokens",
             named ? "the files named val" : nullptr);
    c.tokens_in_use = 1 + std::max(c.train.largest(), c.validation.largest());

    std::string table;  // of tokens: that of every folder which has one
    for (const std::string& path : paths) {
        const std::string beside = fs::path(path).replace_filename("vocabulary.json").string();
        if (beside == table || !fs::exists(beside)) continue;
        const Vocabulary found = Vocabulary::read(beside);
        if (!table.empty() && !(found == c.vocabulary))
            throw Error("--data has ", table, " and ", beside, ", which differ; make all token files with "
                        "one tokenizer (data/tokenize.py).");
        c.vocabulary = found;
        table = beside;
    }
    if (!c.vocabulary.empty() && c.vocabulary.size() < c.tokens_in_use)
        throw Error("--data ", data, " has token ", c.tokens_in_use - 1, ", but ", table, " has only ",
                    c.vocabulary.size(), " tokens; write both again with data/tokenize.py.");
    return c;
}

// The files that a path of --data stands for: of a folder its token files, or all if it has none. A file that
// is named must be text or tokens; in a folder other files are skipped.
std::vector<std::string> files_of(const std::string& path) {
    auto require = [&](bool ok, const char* what) {
        if (!ok) throw Error("--data ", path, " ", what, ", or token files (*.bin).");
    };
    std::error_code unreachable;
    require(fs::exists(path, unreachable), "does not exist; give text files, folders of them");
    if (fs::is_directory(path)) {
        std::vector<std::string> files = files_under(path);
        const auto others = std::stable_partition(files.begin(), files.end(), is_token_file);
        if (others != files.begin()) files.erase(others, files.end());
        return files;
    }
    if (is_token_file(path)) return {path};
    const MappedFile file(path);
    require(file.bytes(), "is empty; give text files");
    require(is_text(file), "is not text: it has NUL bytes; give text files");
    return {path};
}

}  // namespace

Corpus load_corpus(const std::string& data) {
    if (data.empty()) return load_headers(COAT_HEADERS);
    std::vector<std::string> paths;
    std::set<std::string> seen;  // a file that is named twice is read once
    for (const std::string& path : split(data, ','))
        for (const std::string& file : files_of(path))
            if (seen.insert(file).second) paths.push_back(file);
    const auto token_files = std::count_if(paths.begin(), paths.end(), is_token_file);
    if (token_files && token_files < int64_t(paths.size()))
        throw Error("--data ", data, " mixes token files (*.bin) and text; give one kind.");
    const Corpus corpus = token_files ? load_tokens(data, paths) : text_corpus(escaped(data), paths);
    if (!corpus.train.size() && !corpus.validation.size())
        throw Error("--data ", data,
                    " has no text; give text files, folders of them, or token files (*.bin).");
    return corpus;
}

// -----------------------------------------------------------------------------------------------------------
// Loader

static uint64_t mix(uint64_t z) {  // splitmix64's finalizer
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// Element i of a random permutation of [0, n), without a table of n elements. A Feistel network permutes [0,
// 4^half), whatever its round function. It is applied again until the result is below n, which makes a
// permutation of [0, n).
static int64_t permute(uint64_t key, int64_t n, int64_t i) {
    constexpr uint64_t ROUNDS = 6;
    int half = 1;
    while (int64_t{1} << 2 * half < n) half++;
    const uint64_t mask = (uint64_t{1} << half) - 1;
    uint64_t x = i;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < ROUNDS; round++) {
            const uint64_t next = left ^ (mix(key + mix((round << 32) + right)) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= uint64_t(n));
    return int64_t(x);
}

Loader::Loader(TokenStream stream, int64_t B, int64_t T, uint64_t seed)
    : stream_(std::move(stream)), B_(B), T_(T), windows_((stream_.size() - 1) / std::max<int64_t>(T, 1)),
      seed_(seed) {
    if (B < 1 || T < 1) throw Error("--batch and --seq must be at least 1.");
    if (stream_.size() <= T || windows_ < B)
        throw Error("--data has ", stream_.size(), " tokens to train on or held out, fewer than one batch of "
                    "--batch ", B, " and --seq ", T,
                    " needs; give more text, or a smaller --batch or --seq.");
}

// Every epoch has a permutation of its own, with a key made of the seed and the epoch.
int64_t Loader::window(int64_t at) const {
    const int64_t epoch = at / windows_, i = at % windows_;
    return permute(mix(seed_ + 0x9E3779B97F4A7C15ull * uint64_t(epoch + 1)), windows_, i);
}

void Loader::next(int32_t* tokens, int32_t* targets) {
    std::vector<int32_t> both(T_ + 1);
    for (int64_t b = 0; b < B_; b++, at_++, tokens += T_, targets += T_) {
        const int64_t first = window(at_) * T_;
        stream_.read(first, T_ + 1, both.data());
        std::copy(both.begin(), both.end() - 1, tokens);
        std::copy(both.begin() + 1, both.end(), targets);
        stream_.mask(first + 1, T_, targets);
    }
}

int64_t Loader::windows_without_target() const {
    int64_t without = 0;
    std::vector<int32_t> targets(T_);
    for (int64_t w = 0; stream_.masked() && w < windows_; w++) {
        std::fill(targets.begin(), targets.end(), 0);
        stream_.mask(w * T_ + 1, T_, targets.data());
        without += counted_targets(targets.data(), T_) == 0;
    }
    return without;
}

void Loader::seek(Position p) {
    const int64_t most = (int64_t{1} << 60) / windows_;  // epochs; no sum of windows overflows
    if (p.epoch < 0 || p.epoch > most || p.window < 0 || p.window >= windows_)
        throw Error("The run stopped at window ", p.window, " of its data, but --data has only ", windows_,
                    "; give the same --data, --batch and --seq.");
    at_ = p.epoch * windows_ + p.window;
}

}  // namespace coat
