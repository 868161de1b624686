//! LU factorisation with partial pivoting, blocked, as LINPACK's and LAPACK's `dgetrf`.
//!
//! The matrix is tall: its work grows with its bytes, where that of a square one grows with their
//! power of 1.5 (a square one of 256 MiB takes thirty times as long as this one). It lies by
//! columns, so a block of columns is swept again and again, and the update of what is right of it
//! strides through all the memory, a page of each column after the other.

use super::numbers::{fold, numbered, unit};
use super::{Outcome, Parameters, Workload};

const COLUMNS: usize = 128;

/// Columns that are factored before the others are brought up to date.
const BLOCK: usize = 16;
const _: () = assert!(COLUMNS.is_multiple_of(BLOCK) && BLOCK.is_multiple_of(4));

/// Rows that are brought up to date at once: a page of each column, so a block of them is cached.
const STRIP: usize = 512;

pub(super) struct Lu {
    rows: usize,
    seed: u64,
}

impl Lu {
    pub(super) fn new(parameters: &Parameters) -> Self {
        let rows = parameters.words() / COLUMNS;
        assert!(rows >= COLUMNS, "MINIMUM_BYTES is enough for a tall matrix");
        Self {
            rows,
            seed: parameters.seed,
        }
    }

    /// Factors the matrix in place: U on and above the diagonal, L, whose diagonal is of ones, below.
    /// Gives the row that each row was swapped with, and a sum over all of L.
    fn factor(&self, matrix: &mut [u64]) -> ([usize; COLUMNS], u64) {
        let mut pivots = [0; COLUMNS];
        let mut sum = 0u64;
        for first in (0..COLUMNS).step_by(BLOCK) {
            for (index, pivot) in pivots[first..first + BLOCK].iter_mut().enumerate() {
                let column = first + index;
                *pivot = self.pivot(matrix, column);
                sum = sum.wrapping_add(self.eliminate(matrix, column, first + BLOCK));
            }
            self.update(matrix, first);
        }
        (pivots, sum)
    }

    /// Brings the largest element of the column, from the diagonal down, to the diagonal.
    fn pivot(&self, matrix: &mut [u64], column: usize) -> usize {
        let words = &matrix[column * self.rows..][..self.rows];
        let (mut row, mut largest) = (column, 0.0);
        for (index, &word) in words.iter().enumerate().skip(column) {
            let size = f64::from_bits(word).abs();
            if size > largest {
                (row, largest) = (index, size);
            }
        }
        for words in matrix[..COLUMNS * self.rows].chunks_exact_mut(self.rows) {
            words.swap(column, row);
        }
        row
    }

    /// Makes a column of L, and takes it off the columns up to `end`. Gives the sum of the column's
    /// words, weighed by their rows.
    fn eliminate(&self, matrix: &mut [u64], column: usize, end: usize) -> u64 {
        let (left, right) = matrix.split_at_mut((column + 1) * self.rows);
        let (head, lower) = left[column * self.rows..].split_at_mut(column + 1);
        let diagonal = f64::from_bits(head[column]);
        let mut sum = 0u64;
        for (row, word) in lower.iter_mut().enumerate() {
            *word = (f64::from_bits(*word) / diagonal).to_bits();
            sum = sum.wrapping_add(word.wrapping_mul(2 * row as u64 + 1));
        }
        let others = right.chunks_exact_mut(self.rows).take(end - column - 1);
        for other in others {
            let (head, rest) = other.split_at_mut(column + 1);
            let factor = f64::from_bits(head[column]);
            for (word, below) in rest.iter_mut().zip(&*lower) {
                *word = (f64::from_bits(*word) - f64::from_bits(*below) * factor).to_bits();
            }
        }
        sum
    }

    /// Takes a block of columns off all columns right of it.
    fn update(&self, matrix: &mut [u64], first: usize) {
        let end = first + BLOCK;
        let (left, right) = matrix.split_at_mut(end * self.rows);
        let block = &left[first * self.rows..];
        let columns = || 0..COLUMNS - end;
        for column in columns() {
            self.solve(block, &mut right[column * self.rows..][..end], first);
        }
        for from in (end..self.rows).step_by(STRIP) {
            let to = self.rows.min(from + STRIP);
            for column in columns() {
                let (head, rest) = right[column * self.rows..][..to].split_at_mut(from);
                let factors = |index: usize| f64::from_bits(head[first + index]);
                for four in (0..BLOCK).step_by(4) {
                    let lower =
                        [0, 1, 2, 3].map(|index| &block[(four + index) * self.rows..][from..to]);
                    take_off(rest, lower, [0, 1, 2, 3].map(|index| factors(four + index)));
                }
            }
        }
    }

    /// The rows of U that belong to a block, of one column: forward substitution.
    fn solve(&self, block: &[u64], column: &mut [u64], first: usize) {
        for index in 0..BLOCK {
            let factor = f64::from_bits(column[first + index]);
            let lower = &block[index * self.rows..];
            for row in first + index + 1..first + BLOCK {
                let product = f64::from_bits(lower[row]) * factor;
                column[row] = (f64::from_bits(column[row]) - product).to_bits();
            }
        }
    }
}

/// Takes four columns, each times its factor, off another.
fn take_off(column: &mut [u64], lower: [&[u64]; 4], factors: [f64; 4]) {
    // All of a length, which the compiler can see.
    let lower = lower.map(|lower| &lower[..column.len()]);
    for (row, word) in column.iter_mut().enumerate() {
        let product = |index: usize| f64::from_bits(lower[index][row]) * factors[index];
        let sum = (product(0) + product(1)) + (product(2) + product(3));
        *word = (f64::from_bits(*word) - sum).to_bits();
    }
}

impl Workload for Lu {
    fn footprint(&self) -> usize {
        self.rows * COLUMNS * 8
    }

    fn prepare(&mut self, memory: &mut [u64]) {
        for (index, word) in memory[..self.rows * COLUMNS].iter_mut().enumerate() {
            *word = (unit(numbered(self.seed, index as u64)) - 0.5).to_bits();
        }
    }

    fn run(&mut self, memory: &mut [u64]) -> Outcome {
        let (pivots, sum) = self.factor(&mut memory[..self.rows * COLUMNS]);
        let mut checksum = fold(sum, 0);
        for (column, pivot) in pivots.into_iter().enumerate() {
            let upper = &memory[column * self.rows..][..=column];
            checksum = upper.iter().fold(checksum, |sum, &word| fold(sum, word));
            checksum = fold(checksum, pivot as u64);
        }
        // Each step multiplies and subtracts in all rows below and all columns to the right.
        let steps = (0..COLUMNS).map(|step| (self.rows - step - 1) * (COLUMNS - step - 1));
        Outcome {
            operations: steps.sum::<usize>() as u64,
            checksum,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factors_multiply_to_the_matrix_with_its_rows_swapped() {
        // Strips that are full, in part, and not there at all.
        for bytes in [1 << 18, 1_000_000, 1 << 20] {
            let mut lu = Lu::new(&Parameters {
                bytes,
                seed: 8,
                compute: 0,
            });
            let mut memory = vec![0; lu.footprint() / 8];
            lu.prepare(&mut memory);
            let mut wanted = memory.clone();
            let (pivots, _) = lu.factor(&mut memory);
            for (row, &pivot) in pivots.iter().enumerate() {
                assert!(pivot >= row);
                let columns = wanted.chunks_exact_mut(lu.rows);
                columns.for_each(|column| column.swap(row, pivot));
            }
            let at = |row: usize, column: usize| f64::from_bits(memory[column * lu.rows + row]);
            for column in 0..COLUMNS {
                for row in 0..lu.rows {
                    let lower = |index| match row == index {
                        true => 1.0,
                        false => at(row, index),
                    };
                    let both = 0..=row.min(column);
                    let product: f64 = both.map(|index| lower(index) * at(index, column)).sum();
                    let wanted = f64::from_bits(wanted[column * lu.rows + row]);
                    assert!((product - wanted).abs() < 1e-10, "{row}, {column}");
                    // Pivoting keeps L small.
                    assert!(row <= column || at(row, column).abs() <= 1.0);
                }
            }
        }
    }
}
