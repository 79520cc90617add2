/* The sketch of the n-grams of a text. `sketches.py` calls it and says what it is. */

#include <stdint.h>

static uint64_t mix(uint64_t bits) {  /* SplitMix64 (Steele, Lea and Flood, 2014) */
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
    return bits ^ bits >> 31;
}

/* Fills `slots` with the smallest values of the text's n-grams, round after round until each slot has one. Room for a
   number for each n-gram, of which there is one at least, follows the slots. */
void fill_slots(const uint32_t *text, int64_t count, int64_t width, uint64_t factor, uint64_t *slots, int64_t size) {
    uint64_t *grams = slots + size;
    int64_t empty = size;
    for (int64_t slot = 0; slot < size; slot++) slots[slot] = UINT64_MAX;
    for (int64_t place = 0; place < count; place++) {
        uint64_t gram = 0;
        for (int64_t offset = 0; offset < width; offset++) gram = (gram + text[place + offset]) * factor;
        grams[place] = mix(gram);
    }
    for (uint64_t round = 0; empty; round++) {
        for (int64_t place = 0; place < count; place++) {
            uint64_t hash = mix(grams[place] + round * factor);
            uint64_t slot = round < (uint64_t)size ? (hash >> 32) * size >> 32 : round - size;
            uint64_t value = round << 32 | (hash & 0xFFFFFFFF);
            empty -= slots[slot] == UINT64_MAX;
            if (value < slots[slot]) slots[slot] = value;
        }
    }
}
