/* Texts as SentencePiece normalises them by the rules that a model has with it; compiled.py calls this.

   The rules are a tree of bytes in a double array (darts-clone's format), and the texts that they write, each ended by a
   zero. At each place of a text the longest rule counts. */

#include <stddef.h>
#include <stdint.h>

enum { SPACE = 0x2581 };

/* Returns where the text is that the longest rule for the beginning of `text` writes, -1 without one; and what it reads. */
static int64_t find_rule(const uint32_t *rules, const uint8_t *text, int64_t size, int64_t *read) {
    uint32_t unit = rules[0];
    uint32_t at = unit >> 10 << ((unit & 1 << 9) >> 6);
    int64_t found = -1;
    for (int64_t place = 0; place < size; place++) {
        at ^= text[place];
        unit = rules[at];
        if ((unit & 0x800000FF) != text[place]) break;
        at ^= unit >> 10 << ((unit & 1 << 9) >> 6);
        if (unit >> 8 & 1) found = rules[at] & 0x7FFFFFFF, *read = place + 1;
    }
    return found;
}

static int64_t length_of(uint8_t lead) { return lead < 0xC0 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4; }

static uint32_t character_at(const uint8_t *text) {
    if (text[0] < 0x80) return text[0];
    if (text[0] < 0xE0) return (text[0] & 0x1Fu) << 6 | (text[1] & 0x3F);
    if (text[0] < 0xF0) return (text[0] & 0xFu) << 12 | (text[1] & 0x3Fu) << 6 | (text[2] & 0x3F);
    return (text[0] & 7u) << 18 | (text[1] & 0x3Fu) << 12 | (text[2] & 0x3Fu) << 6 | (text[3] & 0x3F);
}

/* A writer of characters, a number each or in UTF-8. */
typedef struct { uint8_t *out, *first; int wide; } Writer;

static inline void put(Writer *writer, uint32_t character) {
    if (character == ' ') character = SPACE;
    if (writer->wide) {
        *(uint32_t *)writer->out = character;
        writer->out += 4;
        return;
    }
    int more = character < 0x80 ? 0 : character < 0x800 ? 1 : character < 0x10000 ? 2 : 3;
    static const uint32_t leads[] = {0, 0xC0, 0xE0, 0xF0};
    writer->out[0] = (uint8_t)(leads[more] | character >> 6 * more);
    for (int place = 1; place <= more; place++)
        writer->out[place] = (uint8_t)(0x80 | (character >> 6 * (more - place) & 0x3F));
    writer->out += more + 1;
}

static int ends_with_space(const Writer *writer) {
    if (writer->wide) return writer->out - writer->first >= 4 && *(uint32_t *)(writer->out - 4) == SPACE;
    return writer->out - writer->first >= 3 && character_at(writer->out - 3) == SPACE && writer->out[-3] == 0xE2;
}

/* Notes the characters (a bit each) with which a rule may begin. */
void find_begins(const uint32_t *rules, uint8_t *begins) {
    for (uint32_t character = 0; character < 0x110000; character++) {
        uint8_t bytes[4];
        Writer writer = {bytes, bytes, 0};
        if (character == ' ') {
            *writer.out++ = ' ';
        } else {
            put(&writer, character);
        }
        uint32_t unit = rules[0], at = unit >> 10 << ((unit & 1 << 9) >> 6);
        int64_t place = 0;
        for (; place < writer.out - bytes; place++) {
            at ^= bytes[place];
            unit = rules[at];
            if ((unit & 0x800000FF) != bytes[place]) break;
            at ^= unit >> 10 << ((unit & 1 << 9) >> 6);
        }
        if (place == writer.out - bytes) begins[character / 8] |= (uint8_t)(1 << character % 8);
    }
}

/* Writes lines, whose bytes follow each other in `text`, and how long each is, in bytes or where `wide` in characters, and
   returns 1; 0 where `room`, the bytes of `out`, may be too small. `prefix`: a space is put before a line; `trims`: spaces
   at its ends and behind others are dropped. */
int64_t normalise(const uint32_t *rules, const uint8_t *targets, const uint8_t *begins, int64_t prefix, int64_t trims,
                  int64_t wide, const uint8_t *text, const int64_t *sizes, int64_t lines, uint8_t *out, int64_t room,
                  int64_t *counts) {
    Writer writer = {out, out, (int)wide};
    for (int64_t line = 0; line < lines; text += sizes[line++]) {
        int64_t size = sizes[line], behind_space = trims, begun = 0;
        writer.first = writer.out;
        for (int64_t place = 0; place < size;) {
            uint32_t character = character_at(text + place);
            int64_t read = length_of(text[place]), found = -1;
            if (writer.out - out + 16 > room) return 0;
            if (begins[character / 8] >> character % 8 & 1) found = find_rule(rules, text + place, size - place, &read);
            const uint8_t *from = found < 0 ? text + place : targets + found;
            int64_t bytes = found < 0 ? read : 0;
            if (found >= 0)
                while (from[bytes]) bytes++;
            place += read;
            if (!begun) {
                if (trims && bytes == 1 && from[0] == ' ') continue;
                begun = 1;
                if (prefix) put(&writer, ' ');
            }
            if (writer.out - out + 4 * bytes + 16 > room) return 0;
            const uint8_t *stop = from + bytes;
            while (behind_space && from < stop && *from == ' ') from++;
            if (from < stop) behind_space = trims && stop[-1] == ' ';
            for (; from < stop; from += length_of(*from)) put(&writer, character_at(from));
        }
        while (trims && ends_with_space(&writer)) writer.out -= wide ? 4 : 3;
        counts[line] = (writer.out - writer.first) / (wide ? 4 : 1);
    }
    return 1;
}
