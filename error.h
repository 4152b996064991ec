// error.h - errors for the user, and text that is safe to print.
//
// A file, a path or a flag can contain any bytes, also those that control a terminal. Text from them is
// printed through printable() or escaped(); the message of an Error is always escaped;
// escaped() within one only shortens a long value.
#pragma once
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace coat {

// The number of bytes of the UTF-8 character at text[at], and its code point; 0 if the bytes are not valid
// UTF-8.
inline size_t utf8_character(const std::string& text, size_t at, uint32_t* point) {
    constexpr uint32_t SMALLEST[] = {0, 0, 0x80, 0x800, 0x10000};  // code point that needs so many bytes
    const auto first = static_cast<unsigned char>(text[at]);
    const size_t length = first < 0x80 ? 1 : first >> 5 == 6 ? 2 : first >> 4 == 14 ? 3
                          : first >> 3 == 30 ? 4 : 0;
    if (length == 0 || length > text.size() - at) return 0;
    *point = length == 1 ? first : first & (0x7Fu >> length);
    for (size_t k = 1; k < length; k++) {
        const auto byte = static_cast<unsigned char>(text[at + k]);
        if (byte >> 6 != 2) return 0;
        *point = *point << 6 | (byte & 0x3F);
    }
    const bool surrogate = *point >> 11 == 0x1B;
    return *point >= SMALLEST[length] && *point <= 0x10FFFF && !surrogate ? length : 0;
}

inline bool is_utf8(const std::string& text) {
    uint32_t point;
    for (size_t i = 0, length; i < text.size(); i += length)
        if (!(length = utf8_character(text, i, &point))) return false;
    return true;
}

// Text that is safe for a terminal: control characters, characters that change the direction of writing, and
// bytes that are not UTF-8 are replaced. Lines::Many: line breaks and tabs remain. Lines::One: they are
// replaced, too.
enum class Lines : uint8_t { One, Many };
inline std::string printable(const std::string& text, Lines lines = Lines::One) {
    std::string out;
    uint32_t point = 0;
    for (size_t i = 0, length; i < text.size(); i += length ? length : 1) {
        length = utf8_character(text, i, &point);
        auto within = [&](uint32_t first, uint32_t last) { return point >= first && point <= last; };
        const bool control = within(0, 0x1F) || within(0x7F, 0x9F);
        const bool direction = point == 0x61C || within(0x200E, 0x200F) || within(0x2028, 0x202E) ||
                               within(0x2066, 0x2069);
        if (text[i] == '\n') out += lines == Lines::Many ? "\n" : "\\n";
        else if (length && !control && !direction) out.append(text, i, length);
        else if (text[i] == '\t' && lines == Lines::Many) out += '\t';
        else out += lines == Lines::Many ? "\xEF\xBF\xBD" : "?";  // U+FFFD, the replacement character
    }
    return out;
}

// A value in a message: on one line. If it has more than `most` bytes, the middle is left out.
inline std::string escaped(const std::string& text, size_t most = 200) {
    if (text.size() <= most) return printable(text);
    auto inside = [&](size_t at) { return (text[at] & 0xC0) == 0x80; };  // not the first byte of a character
    size_t head = most / 2, tail = text.size() - most / 2;
    for (int i = 0; i < 3 && inside(head); i++) head--;
    for (int i = 0; i < 3 && tail < text.size() && inside(tail); i++) tail++;
    return printable(text.substr(0, head)) + "..." + printable(text.substr(tail));
}

// What has been printed so far comes first.
inline void print_error(const std::string& sentence) {
    std::fflush(stdout);
    std::fprintf(stderr, "train: %s\n", printable(sentence).c_str());
}

// The text of parts that are strings or numbers: concat("--seq ", 300, " is too long").
template <class... Parts>
std::string concat(const Parts&... parts) {
    std::string text;
    auto add = [&](const auto& part) {
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) text += std::to_string(part);
        else text += part;
    };
    (add(parts), ...);
    return text;
}

// An error that the user can correct: one sentence, given in parts as above, that names the file or flag and
// says what to do. train.cpp prints it and exits with 1.
struct Error : std::runtime_error {
    template <class... Parts>
    explicit Error(const Parts&... parts) : std::runtime_error(escaped(concat(parts...), 1500)) {}
};

}  // namespace coat
