/* The most probable pieces of a text by a unigram model, as `tokenizers` finds them; fast_unigram.py calls this.

   The pieces are a tree of characters, whose nodes lie in one hash table: the key of a node is its parent's number and
   its character, so that a step down is one look-up. */

#include <stdint.h>

/* A node: `key` is the parent's number << 21 | the character, plus 1; 0 is a free slot. `piece` is -1 inside a piece. */
typedef struct { uint64_t key; double score; int32_t number, piece; } Node;

typedef struct { double score; int32_t from, piece; } Step;  /* the best way to a place: where its last piece begins */

static Node *find(Node *table, int64_t bits, int32_t parent, uint32_t character) {
    uint64_t key = ((uint64_t)parent << 21 | character) + 1, mask = ((uint64_t)1 << bits) - 1;
    uint64_t slot = key * 0x9E3779B97F4A7C15u >> (64 - bits);
    while (table[slot].key && table[slot].key != key) slot = (slot + 1) & mask;
    return table + slot;
}

/* Adds pieces, whose characters follow each other in `text`; of equal ones the last counts. The table has 1 << bits
   slots, all free, more than there are characters. */
void add_pieces(Node *table, int64_t bits, const uint32_t *text, const int64_t *sizes, const double *scores,
                int64_t pieces) {
    int32_t nodes = 0;
    for (int64_t piece = 0; piece < pieces; text += sizes[piece++]) {
        int32_t parent = 0;
        for (int64_t place = 0; place < sizes[piece]; place++) {
            Node *node = find(table, bits, parent, text[place]);
            if (!node->key) *node = (Node){((uint64_t)parent << 21 | text[place]) + 1, 0.0, ++nodes, -1};
            parent = node->number;
            if (place == sizes[piece] - 1) node->score = scores[piece], node->piece = (int32_t)piece;
        }
    }
}

static int write_bytes(uint32_t character, const int32_t *bytes, int32_t *out) {
    if (character < 0x80) return out[0] = bytes[character], 1;
    int more = character < 0x800 ? 1 : character < 0x10000 ? 2 : 3;
    static const uint32_t leads[] = {0, 0xC0, 0xE0, 0xF0};
    out[0] = bytes[leads[more] | character >> 6 * more];
    for (int place = 1; place <= more; place++) out[place] = bytes[0x80 | (character >> 6 * (more - place) & 0x3F)];
    return more + 1;
}

static double rounded(double sum, int64_t rounds) { return rounds ? (float)sum : sum; }

/* Writes the ids of lines, whose characters follow each other in `text`, to `out`, and how many each has to `counts`.
   An unknown character is its `bytes`, or with other unknown ones beside it `unknown` where bytes[0] is -1. `rounds`: sums are kept in float32 and begin again below -100,000, as
   SentencePiece's. `steps` has
   room for a line and one more, `out` for four ids a character. */
void find_pieces(const Node *table, int64_t bits, double unknown_score, int64_t rounds, int32_t unknown,
                 const int32_t *bytes, const uint32_t *text, const int64_t *sizes, int64_t lines, Step *steps, int32_t *out,
                 int64_t *counts) {
    for (int64_t line = 0; line < lines; text += sizes[line++]) {
        int64_t size = sizes[line];
        for (int64_t place = 0; place <= size; place++) steps[place] = (Step){0.0, -1, -1};
        int64_t reach = 0;
        for (int64_t begin = 0; begin < size; begin++) {
            double before = steps[begin].score;
            if (rounds && before < -1e5) {
                for (int64_t end = begin + 1; end <= reach; end++)
                    if (steps[end].from >= 0) steps[end].score = rounded(steps[end].score - before, 1);
                before = 0.0;
            }
            int32_t parent = 0;
            int single = 0;
            for (int64_t end = begin; end < size; end++) {
                const Node *node = find((Node *)table, bits, parent, text[end]);
                if (!node->key) break;
                parent = node->number;
                if (node->piece < 0) continue;
                Step *step = steps + end + 1;
                if (end >= reach) reach = end + 1;
                double score = rounded(node->score + before, rounds);
                if (step->from < 0 || score > step->score) *step = (Step){score, (int32_t)begin, node->piece};
                if (end == begin) single = 1;
            }
            Step *next = steps + begin + 1;
            if (begin >= reach) reach = begin + 1;
            double score = rounded(unknown_score + before, rounds);
            if (!single && (next->from < 0 || score > next->score)) *next = (Step){score, (int32_t)begin, -1};
        }
        /* the path is turned round: `from` of the place where a piece begins becomes where it ends */
        for (int64_t place = size, end = -1; place >= 0;) {
            int64_t from = place ? steps[place].from : -1;
            steps[place].from = (int32_t)end;
            end = place, place = from;
        }
        int32_t *first = out;
        int fused = 0;
        for (int64_t place = 0; place < size;) {
            int64_t end = steps[place].from;
            int32_t piece = steps[end].piece;
            if (piece >= 0) {
                *out++ = piece;
            } else if (bytes[0] >= 0) {
                out += write_bytes(text[place], bytes, out);
            } else if (!fused) {
                *out++ = unknown;
            }
            fused = piece < 0;
            place = end;
        }
        counts[line] = out - first;
    }
}
