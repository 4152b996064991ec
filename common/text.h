// common/text.h - text that the user reads: how it is put together and made printable; errors, each of which
// is one sentence that names the file or the flag, and says what to do; and how a row of a table is found by
// the name that the user gives.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace coat {

// The number of bytes of the UTF-8 character with which s begins: 1 to 4; 0 if s begins with no character. s
// is not empty.
inline size_t utf8_character_length(std::string_view s) {
    const auto byte = [&](size_t i) { return uint8_t(s[i]); };
    const uint8_t first = byte(0);
    if (first < 0x80) return 1;
    if (first < 0xC2 || first > 0xF4) return 0;
    size_t length = 2;
    if (first >= 0xE0) length = 3;
    if (first >= 0xF0) length = 4;
    if (s.size() < length) return 0;
    for (size_t i = 1; i < length; i++)
        if ((byte(i) & 0xC0) != 0x80) return 0;
    const bool overlong = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xF0 && byte(1) < 0x90);
    const bool surrogate = first == 0xED && byte(1) > 0x9F;
    const bool beyond_unicode = first == 0xF4 && byte(1) > 0x8F;
    return overlong || surrogate || beyond_unicode ? 0 : length;
}

// Text of a file, a path, a flag or a model, as a terminal may get it. A character that controls terminals
// becomes "?", except the characters in `kept`. A byte that is no UTF-8 is shown as its number, such as \xE9.
inline std::string printable(std::string_view text, std::string_view kept = {}) {
    std::string shown;
    while (!text.empty()) {
        const size_t length = utf8_character_length(text);
        const auto first = uint8_t(text[0]);
        const bool controls = (first < ' ' || first == 0x7F) && kept.find(text[0]) == kept.npos;
        const bool c1_control = length == 2 && first == 0xC2 && uint8_t(text[1]) < 0xA0;  // U+0080 to U+009F
        char code[8];
        std::snprintf(code, sizeof code, "\\x%02X", first);
        if (length == 0) shown += code;
        else if (controls || c1_control) shown += '?';
        else shown += text.substr(0, length);
        text.remove_prefix(length == 0 ? 1 : length);
    }
    return shown;
}

// The text of parts that are strings or numbers: concat("--seq ", 300, " is too long").
template <class... Parts> std::string concat(const Parts&... parts) {
    std::string text;
    auto add = [&](const auto& part) {
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) text += std::to_string(part);
        else text += part;
    };
    (add(parts), ...);
    return text;
}

// 6738415616 is "6,738,415,616".
inline std::string with_commas(int64_t n) {
    std::string text = std::to_string(n);
    for (int64_t at = int64_t(text.size()) - 3; at > (n < 0); at -= 3) text.insert(size_t(at), ",");
    return text;
}
// "1 rank", "2 ranks", "4,096 batches".
inline std::string with_noun(int64_t n, const std::string& what) {
    const std::string plural = what.ends_with("ch") ? "es" : "s";
    return concat(with_commas(n), " ", what, n == 1 ? "" : plural);
}
// A number of bytes in gigabytes of 10^9 bytes, without the unit: "78.8", "0.021".
inline std::string gigabytes(int64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, bytes < 100'000'000 ? "%.3f" : "%.1f", double(bytes) / 1e9);
    return text;
}

inline bool is_one_of(const std::string& words, const std::string& word) {  // words: "auto cpu gpu"
    return word.find(' ') == word.npos && (" " + words + " ").find(" " + word + " ") != words.npos;
}

// An exception with a sentence for the user, which is given in parts as in concat(). main.cpp prints the
// sentence and exits with code 1.
struct Error : std::runtime_error {
    template <class... Parts>
    explicit Error(const Parts&... parts) : std::runtime_error(printable(concat(parts...))) {}
};

// The row of a table that has this name, or null.
template <class Table> const auto* find_row_or_null(const Table& table, std::string_view name) {
    const auto has_name = [&](const auto& row) { return name == row.name; };
    const auto row = std::find_if(std::begin(table), std::end(table), has_name);
    return row == std::end(table) ? nullptr : &*row;
}

// The row of a table that has this name. An unknown name is an Error that lists the known ones; `flag` is the
// flag that gave it.
template <class Table> const auto& find_row(const Table& table, std::string_view name, const char* flag) {
    if (const auto* row = find_row_or_null(table, name)) return *row;
    std::string known;
    for (const auto& row : table) known += (known.empty() ? "" : ", ") + std::string(row.name);
    throw Error(flag, " ", name, " is not known; choose one of ", known, ".");
}

// Flushes standard output first: the error comes after what was printed before.
inline void print_error(const std::string& sentence) {
    std::fflush(stdout);
    std::fprintf(stderr, "train: %s\n", printable(sentence).c_str());
}

}  // namespace coat
