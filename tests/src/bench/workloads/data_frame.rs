//! Queries on columns, as an analyst asks them of New York's taxi trips, the table that AIFM (Ruan et
//! al., OSDI 2020) measures its data frames by. The trips here are made up: sorted by when they
//! began, with zones and lengths that some have far more than others.

use super::numbers::{Random, fold};
use super::{Outcome, Parameters, Workload};

const ZONES: usize = 265;
const HOURS: usize = 24;
const PASSENGERS_MAX: usize = 6;
const SECONDS_PER_HOUR: u64 = 3600;

/// The time that the trips are of.
const SECONDS: u64 = 31 * 24 * SECONDS_PER_HOUR;

/// Rows of the columns, of which there are this many.
const COLUMNS: usize = 7;

/// How often all queries are asked, each time with other limits.
const ROUNDS: u64 = 4;
const QUERIES: u64 = 4;

pub(super) struct DataFrame {
    rows: usize,
    seed: u64,
}

/// One trip to a row. Lengths in miles, durations in seconds, fares in dollars.
struct Columns<'a> {
    began: &'a mut [u64],
    zone: &'a mut [u64],
    passengers: &'a mut [u64],
    duration: &'a mut [u64],
    length: &'a mut [u64],
    fare: &'a mut [u64],
    /// Miles an hour; a query makes it of others.
    speed: &'a mut [u64],
}

/// What is known of the rows with one key.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Group {
    rows: u64,
    sum: f64,
    most: f64,
}

impl DataFrame {
    pub(super) fn new(parameters: &Parameters) -> Self {
        Self {
            rows: parameters.words() / COLUMNS,
            seed: parameters.seed,
        }
    }

    fn columns<'a>(&self, memory: &'a mut [u64]) -> Columns<'a> {
        let mut rest = &mut memory[..COLUMNS * self.rows];
        let mut column = || {
            let column;
            (column, rest) = std::mem::take(&mut rest).split_at_mut(self.rows);
            column
        };
        Columns {
            began: column(),
            zone: column(),
            passengers: column(),
            duration: column(),
            length: column(),
            fare: column(),
            speed: column(),
        }
    }
}

impl Workload for DataFrame {
    fn footprint(&self) -> usize {
        COLUMNS * self.rows * 8
    }

    fn prepare(&mut self, memory: &mut [u64]) {
        let columns = self.columns(memory);
        let mut random = Random::new(self.seed);
        let seconds_per_row = SECONDS as f64 / self.rows as f64;
        for row in 0..self.rows {
            columns.began[row] = ((row as f64 + random.unit()) * seconds_per_row) as u64;
            // Squares and cubes of even numbers: the low ones are many.
            columns.zone[row] = (random.unit().powi(2) * ZONES as f64) as u64;
            columns.passengers[row] = 1 + (random.unit().powi(3) * PASSENGERS_MAX as f64) as u64;
            let length = 0.3 + 20.0 * random.unit().powi(3);
            columns.length[row] = length.to_bits();
            columns.duration[row] = (60.0 + length * (90.0 + 300.0 * random.unit())) as u64;
            // In whole cents, as fares are.
            let cents = (300.0 + 250.0 * length + 200.0 * random.unit()).round();
            columns.fare[row] = (cents / 100.0).to_bits();
        }
        columns.speed.fill(0);
    }

    fn run(&mut self, memory: &mut [u64]) -> Outcome {
        let mut columns = self.columns(memory);
        let mut checksum = 0;
        let mut note = |groups: Vec<Group>| {
            for group in groups {
                let words = [group.rows, group.sum.to_bits(), group.most.to_bits()];
                checksum = words.into_iter().fold(checksum, fold);
            }
        };
        for round in 0..ROUNDS {
            note(lengths_by_passengers(&columns));
            note(fares_by_zone(&columns, 1.0 + round as f64));
            note(speeds_by_hour(&mut columns));
            note(slow_fares_by_zone(&columns, 12.0 + 2.0 * round as f64));
        }
        Outcome {
            operations: ROUNDS * QUERIES * self.rows as u64,
            checksum,
        }
    }
}

/// Groups values by their keys, which are below `keys`.
fn group(keys: usize, rows: impl Iterator<Item = (usize, f64)>) -> Vec<Group> {
    let nobody = Group {
        rows: 0,
        sum: 0.0,
        most: f64::NEG_INFINITY,
    };
    let mut groups = vec![nobody; keys];
    for (key, value) in rows {
        let group = &mut groups[key];
        group.rows += 1;
        group.sum += value;
        group.most = group.most.max(value);
    }
    groups
}

/// How long trips are that so many passengers make.
fn lengths_by_passengers(columns: &Columns<'_>) -> Vec<Group> {
    let rows = columns.passengers.iter().zip(&*columns.length);
    let rows = rows.map(|(&passengers, &length)| (passengers as usize, f64::from_bits(length)));
    group(PASSENGERS_MAX + 1, rows)
}

/// What trips cost that are longer than `least`, by zone.
fn fares_by_zone(columns: &Columns<'_>, least: f64) -> Vec<Group> {
    let rows = (columns.length.iter().zip(&*columns.zone)).zip(&*columns.fare);
    let rows = rows
        .filter(|((length, _), _)| f64::from_bits(**length) > least)
        .map(|((_, &zone), &fare)| (zone as usize, f64::from_bits(fare)));
    group(ZONES, rows)
}

/// Makes the column of speeds, and groups it by the hour of the day.
fn speeds_by_hour(columns: &mut Columns<'_>) -> Vec<Group> {
    let trips = (columns.length.iter().zip(&*columns.duration)).zip(&*columns.began);
    let rows = trips.zip(columns.speed.iter_mut());
    let rows = rows.map(|(((&length, &duration), &began), speed)| {
        let hours = duration as f64 / SECONDS_PER_HOUR as f64;
        let value = f64::from_bits(length) / hours;
        *speed = value.to_bits();
        ((began / SECONDS_PER_HOUR) as usize % HOURS, value)
    });
    group(HOURS, rows)
}

/// What trips cost that are slower than `limit`, by zone.
fn slow_fares_by_zone(columns: &Columns<'_>, limit: f64) -> Vec<Group> {
    let rows = (columns.speed.iter().zip(&*columns.zone)).zip(&*columns.fare);
    let rows = rows
        .filter(|((speed, _), _)| f64::from_bits(**speed) < limit)
        .map(|((_, &zone), &fare)| (zone as usize, f64::from_bits(fare)));
    group(ZONES, rows)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Compares with what a map makes of the rows that an index, a key and a value are told of.
    fn check(found: Vec<Group>, rows: usize, ask: impl Fn(usize) -> Option<(u64, f64)>) {
        let mut wanted: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
        for (key, value) in (0..rows).filter_map(ask) {
            wanted.entry(key).or_default().push(value);
        }
        let keys = found.iter().filter(|group| group.rows > 0).count();
        assert!(
            keys == wanted.len() && keys > 1,
            "{keys} keys of {}",
            wanted.len()
        );
        for (key, values) in wanted {
            let group = found[key as usize];
            assert_eq!(group.rows, values.len() as u64);
            assert_eq!(group.sum, values.iter().sum::<f64>());
            assert!(values.contains(&group.most));
            assert!(values.iter().all(|&value| value <= group.most));
        }
    }

    fn prepared() -> (DataFrame, Vec<u64>) {
        let mut frame = DataFrame::new(&Parameters {
            bytes: 1 << 20,
            seed: 10,
            compute: 0,
        });
        let mut memory = vec![0; frame.footprint() / 8];
        frame.prepare(&mut memory);
        (frame, memory)
    }

    #[test]
    fn queries_answer_as_rows_by_themselves_do() {
        let (frame, mut memory) = prepared();
        let mut columns = frame.columns(&mut memory);
        let speeds = speeds_by_hour(&mut columns);
        let columns = columns;
        let value = |column: &[u64], row: usize| f64::from_bits(column[row]);
        let speed = |row| {
            let seconds = columns.duration[row] as f64;
            value(columns.length, row) / (seconds / 3600.0)
        };
        check(speeds, frame.rows, |row| {
            Some((columns.began[row] / 3600 % 24, speed(row)))
        });
        check(lengths_by_passengers(&columns), frame.rows, |row| {
            Some((columns.passengers[row], value(columns.length, row)))
        });
        check(fares_by_zone(&columns, 2.5), frame.rows, |row| {
            let fare = (columns.zone[row], value(columns.fare, row));
            (value(columns.length, row) > 2.5).then_some(fare)
        });
        check(slow_fares_by_zone(&columns, 15.0), frame.rows, |row| {
            let fare = (columns.zone[row], value(columns.fare, row));
            (speed(row) < 15.0).then_some(fare)
        });
    }

    #[test]
    fn trips_are_as_trips_are() {
        let (frame, mut memory) = prepared();
        let columns = frame.columns(&mut memory);
        assert!(columns.began.is_sorted() && columns.began[frame.rows - 1] < SECONDS);
        assert!(columns.zone.iter().all(|&zone| zone < ZONES as u64));
        let passengers = 1..=PASSENGERS_MAX as u64;
        assert!(
            columns
                .passengers
                .iter()
                .all(|count| passengers.contains(count))
        );
        assert!(columns.duration.iter().all(|&seconds| seconds >= 60));
    }
}
