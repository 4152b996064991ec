// error.h - errors for the user: one sentence that names the file or the flag, and says what to do.
#pragma once
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace coat {

// Text of a file, a path, a flag or a model, without the bytes that control a terminal, but for those `kept`.
inline std::string printable(std::string text, std::string_view kept = {}) {
    for (char& c : text)
        if ((uint8_t(c) < ' ' || c == 0x7F) && kept.find(c) == kept.npos) c = '?';
    return text;
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

inline bool is_one_of(const std::string& words, const std::string& word) {  // words: "auto cpu gpu"
    return word.find(' ') == word.npos && (" " + words + " ").find(" " + word + " ") != words.npos;
}

// Its text is given in parts, as above. train.cpp prints it and exits with 1.
struct Error : std::runtime_error {
    template <class... Parts>
    explicit Error(const Parts&... parts) : std::runtime_error(printable(concat(parts...))) {}
};

// What has been printed so far comes first.
inline void print_error(const std::string& sentence) {
    std::fflush(stdout);
    std::fprintf(stderr, "train: %s\n", printable(sentence).c_str());
}

}  // namespace coat
