// data/json.cpp - one reader for every JSON file (json.h).
#include "json.h"

#include <cstring>

namespace coat {

namespace {

using nlohmann::json;

constexpr int MAX_DEPTH = 32;

struct Counts {  // what a text would have, were it valid JSON
    int depth = 0;
    int64_t values = 1, names = 0;
};

Counts count(const char* text, int64_t bytes) {
    Counts counts;
    int depth = 0;
    bool quoted = false;
    for (int64_t i = 0; i < bytes; i++) {
        const char c = text[i];
        if (c == '"') quoted = !quoted;
        if (quoted) {
            i += c == '\\';  // the next character is escaped
            continue;
        }
        if (c == '{' || c == '[') counts.depth = std::max(counts.depth, ++depth), counts.values++;
        if (c == '}' || c == ']') depth--;
        if (c == ',') counts.values++;
        if (c == ':') counts.names++;
    }
    return counts;
}

int64_t names_in(const json& value) {
    if (!value.is_structured()) return 0;
    int64_t names = value.is_object() ? static_cast<int64_t>(value.size()) : 0;
    for (const json& inner : value) names += names_in(inner);
    return names;
}

}  // namespace

json parse_json(const void* data, int64_t bytes, std::string* why, int64_t most_values) {
    const char* text = static_cast<const char*>(data);
    const Counts counts = count(text, bytes);
    why->clear();
    if (counts.depth > MAX_DEPTH) *why = "is nested more than " + std::to_string(MAX_DEPTH) + " deep";
    else if (counts.values > most_values) *why = "has more than " + std::to_string(most_values) + " values";
    if (!why->empty()) return json();
    // The library would take a zero byte for the end.
    const bool zero = bytes && std::memchr(text, 0, static_cast<size_t>(bytes));
    json value = zero ? json() : json::parse(text, text + bytes, nullptr, /*allow_exceptions=*/false);
    if (!value.is_object()) *why = "is not a JSON object";
    // Readers differ on which of two equal names counts.
    else if (names_in(value) != counts.names) *why = "has a name twice in one object";
    return value;
}

}  // namespace coat
