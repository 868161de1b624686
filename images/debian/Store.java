import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;

/**
 * A store of values on the Java heap, whose entries are read and replaced at random, so that the garbage
 * collector moves them; then a large array is sorted. Every value follows from its key and version, and all
 * are compared at the end.
 *
 * Arguments: MiB of values, operations.
 */
public final class Store {
    private static final int VALUE_BYTES = 1024;

    private static long seed = 1;

    /** SplitMix64. */
    private static long mix(long of) {
        long z = of + 0x9e3779b97f4a7c15L;
        z = (z ^ (z >>> 30)) * 0xbf58476d1ce4e5b9L;
        z = (z ^ (z >>> 27)) * 0x94d049bb133111ebL;
        return z ^ (z >>> 31);
    }

    private static int random(int below) {
        seed = mix(seed);
        return (int) Long.remainderUnsigned(seed, below);
    }

    private static long[] value(int key, int version) {
        long[] words = new long[VALUE_BYTES / 8];
        for (int at = 0; at < words.length; at++) {
            words[at] = (((long) key << 32) | version) * 31 + at * 0x9e3779b97f4a7c15L;
        }
        return words;
    }

    private static void demand(boolean is, int key) {
        if (!is) {
            System.out.println("RESULT WRONG value of key " + key);
            System.exit(1);
        }
    }

    public static void main(String[] arguments) {
        int keys = Integer.parseInt(arguments[0]) * (1024 * 1024 / VALUE_BYTES);
        int operations = Integer.parseInt(arguments[1]);
        Map<Integer, long[]> store = new HashMap<>(keys * 2);
        int[] versions = new int[keys];
        for (int key = 0; key < keys; key++) {
            store.put(key, value(key, 0));
        }
        System.out.println("BEGIN");
        for (int count = 0; count < operations; count++) {
            int key = random(keys);
            if (count % 4 == 0) {
                versions[key]++;
                store.put(key, value(key, versions[key]));
            } else {
                int at = random(VALUE_BYTES / 8);
                demand(store.get(key)[at] == value(key, versions[key])[at], key);
            }
        }
        long[] numbers = new long[operations];
        for (int at = 0; at < operations; at++) {
            numbers[at] = mix(at);
        }
        Arrays.sort(numbers);
        System.out.println("END");
        long sum = 0;
        for (int key = 0; key < keys; key++) {
            long[] found = store.get(key);
            demand(Arrays.equals(found, value(key, versions[key])), key);
            sum = mix(sum ^ found[found.length - 1]);
        }
        for (int at = 1; at < operations; at++) {
            demand(numbers[at - 1] <= numbers[at], at);
            sum = mix(sum ^ numbers[at]);
        }
        System.out.println("RESULT " + Long.toHexString(sum));
    }
}
