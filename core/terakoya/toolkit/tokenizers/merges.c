/* The pieces of a text by a BPE model, as merging pair by pair finds them, without merging: merges.py calls this.

   A text's pieces are those of which every two neighbours stay as they are when they are merged alone, and each is found
   again when its own symbols are merged; there is one such sequence, because merging is deterministic, and a merge across
   a border depends on its two sides only. So the longest piece that stays beside the last one is taken, a shorter one
   where none stays, and where no shorter one does the last one is taken back, once for each place at most. */

#include <stdint.h>
#include <string.h>

enum { LONGEST = 1024, FILTER = 3, IS_PIECE = 1 << 8, IS_NODE = 1 << 9, BASE = 10 };

typedef uint32_t Node;  /* of a tree of bytes: child `b` is at `base ^ b`, if that has the byte `b` below its base and two
                           marks; no two nodes have the same base, and a base of 0 is that of a node without children */
typedef struct { uint64_t pair; int32_t rank, piece; } Merge;  /* a slot of a hash table, free where `pair` is 0 */
typedef struct {
    int32_t left, right, rank;  /* the last merge that makes it; -1, -1, -1 is a symbol */
    int32_t prefix;             /* the longest piece that it begins with, or -1 */
} Piece;

typedef struct {
    Node *nodes;
    int32_t *piece_of;          /* the piece that ends at a node */
    uint8_t *bases;             /* which bases are taken */
    Merge *merges;
    uint64_t *filter;           /* a bit for each pair, maybe of several, that is merged */
    Piece *pieces;
    int32_t *sizes;             /* the bytes of each piece, 0 where no merges make it */
    uint8_t *odd;               /* whether ranks fall in a piece */
    const int32_t *symbols;     /* of all pieces */
    const int64_t *begins;      /* where the symbols of each piece begin, and behind the last one */
    const uint8_t *text;        /* of all pieces */
    const int64_t *places;      /* where the text of each piece begins, and behind the last one */
    int64_t node_count, merge_bits, piece_count, some_odd;
} Model;

static uint64_t pair_of(int32_t left, int32_t right) { return ((uint64_t)left << 32 | (uint32_t)right) + 1; }

static uint64_t hash_of(uint64_t pair, int64_t bits) { return pair * 0x9E3779B97F4A7C15u >> (64 - bits); }

static Merge *find_merge(const Model *model, int32_t left, int32_t right) {
    uint64_t pair = pair_of(left, right), mask = ((uint64_t)1 << model->merge_bits) - 1;
    uint64_t slot = hash_of(pair, model->merge_bits);
    while (model->merges[slot].pair && model->merges[slot].pair != pair) slot = (slot + 1) & mask;
    return model->merges + slot;
}

/* Merges `size` symbols, the pair of the lowest rank first, of equal ones the left one. Returns how many pieces remain;
   `last` is the last merge. */
static int64_t merge(const Model *model, int32_t *row, int64_t size, Piece *last) {
    Merge *found[LONGEST];
    for (int64_t place = 0; place + 1 < size; place++) found[place] = find_merge(model, row[place], row[place + 1]);
    for (;;) {
        int64_t best = -1;
        for (int64_t place = 0; place + 1 < size; place++)
            if (found[place]->pair && (best < 0 || found[place]->rank < found[best]->rank)) best = place;
        if (best < 0) return size;
        *last = (Piece){row[best], row[best + 1], found[best]->rank, -1};
        row[best] = found[best]->piece;
        memmove(row + best + 1, row + best + 2, (size - best - 2) * sizeof *row);
        memmove(found + best, found + best + 1, (size - best - 2) * sizeof *found);
        size--;
        if (best > 0) found[best - 1] = find_merge(model, row[best - 1], row[best]);
        if (best + 1 < size) found[best] = find_merge(model, row[best], row[best + 1]);
    }
}

/* Adds a tree's node for each byte of `order`[low, high), pieces in the order of their bytes, of which `depth` are equal. */
static int add_nodes(Model *model, const int32_t *order, int64_t low, int64_t high, int64_t depth, int64_t node,
                     int64_t *first_free) {
    uint8_t bytes[256];
    int64_t starts[257], count = 0;
    if (low < high && model->sizes[order[low]] == depth) {
        model->nodes[node] |= IS_PIECE;
        model->piece_of[node] = order[low++];
    }
    for (int64_t at = low; at < high; at++) {
        uint8_t byte = model->text[model->places[order[at]] + depth];
        if (!count || bytes[count - 1] != byte) bytes[count] = byte, starts[count++] = at;
    }
    if (!count) return 1;
    starts[count] = high;
    while (*first_free < model->node_count && model->nodes[*first_free]) ++*first_free;
    int64_t base = 0, taken = 1;
    for (int64_t slot = *first_free; taken; slot++) {
        if ((slot | 0xFF) >= model->node_count) return 0;
        base = slot ^ bytes[0], taken = !base || model->bases[base];
        for (int64_t child = 0; child < count && !taken; child++) taken = model->nodes[base ^ bytes[child]] != 0;
    }
    if ((base ^ bytes[0]) > *first_free + 256) *first_free = base ^ bytes[0];
    model->bases[base] = 1;
    model->nodes[node] |= (uint32_t)base << BASE;
    for (int64_t child = 0; child < count; child++) model->nodes[base ^ bytes[child]] = IS_NODE | bytes[child];
    for (int64_t child = 0; child < count; child++)
        if (!add_nodes(model, order, starts[child], starts[child + 1], depth + 1, base ^ bytes[child], first_free)) return 0;
    return 1;
}

/* Returns the longest piece of at most `size` bytes that `text` begins with, and its bytes; -1 if there is none. */
static inline int32_t longest(const Model *model, const uint8_t *text, int64_t size, int64_t *bytes) {
    uint32_t node = model->nodes[0], best = 0;
    for (int64_t place = 0; place < size;) {
        uint32_t at = node >> BASE ^ text[place];
        node = model->nodes[at];
        if ((node & (IS_NODE | 0xFF)) != (IS_NODE | text[place])) break;
        place++;
        if (node & IS_PIECE) best = at, *bytes = place;
    }
    return best ? model->piece_of[best] : -1;
}

/* Fills the tables of a model from `count` rows of left piece, right piece, merged piece, rank, of which the last counts
   where pairs are equal. `order` has the pieces in the order of their bytes. The tables
   are 0. Returns 0 where
   the tables are too small. */
int64_t build(Model *model, const int32_t *rows, int64_t count, int32_t *order) {
    for (const int32_t *row = rows; row < rows + 4 * count; row += 4) {
        uint64_t pair = pair_of(row[0], row[1]), bit = hash_of(pair, model->merge_bits + FILTER);
        *find_merge(model, row[0], row[1]) = (Merge){pair, row[3], row[2]};
        model->filter[bit / 64] |= (uint64_t)1 << bit % 64;
    }
    int64_t kept = 0;
    for (int64_t piece = 0; piece < model->piece_count; piece++) {
        const int32_t *symbols = model->symbols + model->begins[piece];
        int64_t size = model->begins[piece + 1] - model->begins[piece];
        int32_t row[LONGEST];
        Piece *to = model->pieces + piece;
        *to = (Piece){-1, -1, -1, -1};
        if (!size || size > LONGEST || symbols[0] < 0) continue;
        memcpy(row, symbols, size * sizeof *row);
        if (merge(model, row, size, to) == 1 && row[0] == piece)
            model->sizes[piece] = (int32_t)(model->places[piece + 1] - model->places[piece]);
    }
    for (int64_t at = 0; at < model->piece_count; at++)
        if (model->sizes[order[at]]) order[kept++] = order[at];
    int64_t first_free = 1, size;
    model->nodes[0] = IS_NODE | 0xFF;  /* no text has that byte, and so it is no child */
    if (!add_nodes(model, order, 0, kept, 0, 0, &first_free)) return 0;
    for (int64_t at = 0; at < kept; at++)
        model->pieces[order[at]].prefix =
            longest(model, model->text + model->places[order[at]], model->sizes[order[at]] - 1, &size);
    for (int more = 1; more;) {  /* a piece is odd, too, if one in it is */
        more = 0;
        for (int64_t at = 0; at < kept; at++) {
            const Piece *piece = model->pieces + order[at];
            int32_t left = piece->left, right = piece->right;
            if (left < 0 || model->odd[order[at]]) continue;
            if (model->odd[left] || model->odd[right] || model->pieces[left].rank >= piece->rank ||
                model->pieces[right].rank >= piece->rank)
                model->odd[order[at]] = model->some_odd = more = 1;
        }
    }
    return 1;
}

/* Returns whether two pieces stay as they are: looks back, from the last merge in either of them to the first, for one
   across their border that comes before. */
static int stays(const Model *model, int32_t left, int32_t right) {
    const Piece *pieces = model->pieces;
    if (model->some_odd && (model->odd[left] || model->odd[right])) {
        int32_t row[LONGEST];
        int64_t one = model->begins[left + 1] - model->begins[left], two = model->begins[right + 1] - model->begins[right];
        if (one + two > LONGEST) return 0;
        memcpy(row, model->symbols + model->begins[left], one * sizeof *row);
        memcpy(row + one, model->symbols + model->begins[right], two * sizeof *row);
        Piece last;
        return merge(model, row, one + two, &last) == 2 && row[0] == left && row[1] == right;
    }
    for (int32_t before = INT32_MAX;;) {
        uint64_t bit = hash_of(pair_of(left, right), model->merge_bits + FILTER);
        if (model->filter[bit / 64] >> bit % 64 & 1) {
            const Merge *across = find_merge(model, left, right);
            if (across->pair && across->rank < before) return 0;
        }
        int32_t one = pieces[left].rank, two = pieces[right].rank;
        if (one < 0 && two < 0) return 1;
        if (one > two) {
            before = one, left = pieces[left].right;
        } else {
            before = two + 1, right = pieces[right].left;
        }
    }
}

/* Writes the pieces of `text` to `out` until a byte that no piece begins with, and returns how many there are; `read` is
   where that is. `dead` has room for a mark behind each byte, and is 0 before and after. */
static int64_t find_known(const Model *model, const uint8_t *text, int64_t size, uint8_t *dead, int32_t *out,
                         int64_t *read) {
    int64_t place = 0, count = 0, marked = 0, bytes = 0;
    int32_t next = longest(model, text, size, &bytes);
    while (next >= 0) {
        if (!dead[place + bytes] && (!count || stays(model, out[count - 1], next))) {
            out[count++] = next, place += bytes;
            next = longest(model, text + place, size - place, &bytes);
        } else if (model->pieces[next].prefix >= 0) {
            next = model->pieces[next].prefix, bytes = model->sizes[next];
        } else if (count) {
            dead[place] = 1;
            if (place > marked) marked = place;
            next = out[--count], bytes = model->sizes[next], place -= bytes;
        } else {
            break;
        }
    }
    if (marked) memset(dead, 0, marked + 1);
    *read = place;
    return count;
}

static int64_t length_of(uint8_t lead) { return lead < 0xC0 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4; }

/* Writes the ids of lines, whose bytes follow each other in `text`, to `out`, and how many each has to `counts`. An unknown
   character is its `bytes`, or with other unknown ones beside it `unknown` where bytes[0] is -1. `dead` has a zero for
   each byte of a line and one more, `out` room for one id a byte. */
void find_pieces(const Model *model, int32_t unknown, const int32_t *bytes, const uint8_t *text, const int64_t *sizes,
                 int64_t lines, uint8_t *dead, int32_t *out, int64_t *counts) {
    for (int64_t line = 0; line < lines; text += sizes[line++]) {
        const int32_t *first = out;
        int fused = 0;
        for (int64_t place = 0, read; place < sizes[line];) {
            int64_t count = find_known(model, text + place, sizes[line] - place, dead, out, &read);
            out += count, place += read;
            if (count) fused = 0;
            if (place == sizes[line]) break;
            int64_t size = length_of(text[place]);
            if (bytes[0] >= 0) {
                for (int64_t each = 0; each < size; each++) *out++ = bytes[text[place + each]];
            } else if (!fused) {
                *out++ = unknown, fused = 1;
            }
            place += size;
        }
        counts[line] = out - first;
    }
}
