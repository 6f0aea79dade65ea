//! From measurements to a table.
//!
//! In: what was measured of each program. Out: a table in Markdown with ratios.

use std::fmt::Write;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::objects::Size;
use super::program::Kind;

/// A number with its unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Value {
    /// A time.
    Time(Duration),
    /// Memory in bytes.
    Bytes(u64),
    /// A number of things.
    Count(usize),
    /// So many a second.
    Rate(f64),
    /// Bytes a second.
    Throughput(f64),
}

impl Value {
    fn number(self) -> f64 {
        match self {
            Self::Time(time) => time.as_secs_f64(),
            #[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
            Self::Bytes(bytes) => bytes as f64,
            #[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
            Self::Count(count) => count as f64,
            Self::Rate(rate) | Self::Throughput(rate) => rate,
        }
    }

    /// How much better `self` is than `other`: above 1, better. Nothing where one of them is zero.
    fn ratio_to(self, other: Self) -> String {
        let (ours, theirs) = (self.number(), other.number());
        if ours <= 0.0 || theirs <= 0.0 {
            return String::new();
        }
        let ratio = match self {
            Self::Rate(_) | Self::Throughput(_) => ours / theirs,
            Self::Time(_) | Self::Bytes(_) | Self::Count(_) => theirs / ours,
        };
        match ratio {
            ..0.01 => "< 0.01".to_owned(),
            ..10.0 => format!("{ratio:.2}"),
            _ => format!("{ratio:.0}"),
        }
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Time(time) => {
                let seconds = time.as_secs_f64();
                match seconds {
                    1.0.. => write!(f, "{seconds:.2} s"),
                    0.1.. => write!(f, "{:.0} ms", seconds * 1e3),
                    0.001.. => write!(f, "{:.1} ms", seconds * 1e3),
                    _ => write!(f, "{:.0} µs", seconds * 1e6),
                }
            }
            Self::Bytes(_) => write!(f, "{:.1} MiB", self.number() / f64::from(1 << 20)),
            Self::Count(count) => write!(f, "{count}"),
            Self::Rate(rate) => write!(f, "{rate:.0}"),
            Self::Throughput(rate) => write!(f, "{:.2} GiB/s", rate / f64::from(1 << 30)),
        }
    }
}

/// The value below which `percent` of the samples lie, by nearest rank; zero without samples.
#[must_use]
pub fn percentile(samples: &[Duration], percent: usize) -> Duration {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or_default()
}

/// What was measured of one program at one size, in the order of the table.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured(Vec<(String, Value)>);

impl Measured {
    /// Adds a row.
    pub fn add(&mut self, what: &str, value: Value) {
        self.0.push((what.to_owned(), value));
    }

    /// Adds a row with a time.
    pub fn time(&mut self, what: &str, time: Duration) {
        self.add(what, Value::Time(time));
    }

    /// The medians of several measurements of the same.
    #[must_use]
    pub fn median(rounds: &[Self]) -> Self {
        let rows = rounds.first().into_iter().flat_map(|first| &first.0);
        let middle = |what| {
            let mut values: Vec<Value> = rounds.iter().filter_map(|round| round.get(what)).collect();
            values.sort_by(|one, other| one.number().total_cmp(&other.number()));
            values.get(values.len() / 2).copied()
        };
        Self(rows.filter_map(|(what, _)| Some((what.clone(), middle(what)?))).collect())
    }

    fn get(&self, what: &str) -> Option<Value> {
        self.0.iter().find(|(row, _)| *row == what).map(|(_, value)| *value)
    }
}

/// A column of a table.
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// Its heading.
    pub name: String,
    /// Whether a column follows that says how much better this one is than the one before.
    pub compared: bool,
}

/// The table of one size. The ratio is kube-proxy's value in Pointsman's.
#[must_use]
pub fn table(size: Size, columns: &[(Kind, Measured)]) -> String {
    let compared = |kind| columns.len() == 2 && kind == Kind::Pointsman;
    let columns: Vec<(Column, Measured)> = columns
        .iter()
        .map(|(kind, measured)| {
            (Column { name: kind.to_string(), compared: compared(*kind) }, measured.clone())
        })
        .collect();
    comparison(&size.to_string(), &columns)
}

/// A table with this word in its corner, and the rows of the last column.
#[must_use]
pub fn comparison(corner: &str, columns: &[(Column, Measured)]) -> String {
    let (mut text, mut line) = (format!("| {corner} |"), "|---|".to_owned());
    for (column, _) in columns {
        let _ = write!(text, " {} |{}", column.name, if column.compared { " ratio |" } else { "" });
        line += if column.compared { "---:|---:|" } else { "---:|" };
    }
    let _ = writeln!(text, "\n{line}");
    for (what, _) in columns.last().into_iter().flat_map(|(_, measured)| &measured.0) {
        let _ = write!(text, "| {what} |");
        let mut before = None;
        for (column, measured) in columns {
            let value = measured.get(what);
            let shown = value.map_or_else(|| "–".to_owned(), |value| value.to_string());
            let _ = write!(text, " {shown} |");
            if column.compared {
                let ratio = value.zip(before).map(|(ours, theirs)| ours.ratio_to(theirs));
                let _ = write!(text, " {} |", ratio.unwrap_or_default());
            }
            before = value;
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn milliseconds(numbers: &[u64]) -> Vec<Duration> {
        numbers.iter().copied().map(Duration::from_millis).collect()
    }

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let samples = milliseconds(&[40, 10, 30, 20]);
        assert_eq!(percentile(&samples, 50), Duration::from_millis(20));
        assert_eq!(percentile(&samples, 99), Duration::from_millis(40));
        let hundred: Vec<u64> = (1..=100).collect();
        assert_eq!(percentile(&milliseconds(&hundred), 99), Duration::from_millis(99));
        assert_eq!(percentile(&milliseconds(&[7]), 50), Duration::from_millis(7));
        assert_eq!(percentile(&[], 50), Duration::ZERO);
    }

    #[test]
    fn values_have_units_that_fit() {
        for (value, text) in [
            (Value::Time(Duration::from_millis(12_345)), "12.35 s"),
            (Value::Time(Duration::from_millis(345)), "345 ms"),
            (Value::Time(Duration::from_micros(4_560)), "4.6 ms"),
            (Value::Time(Duration::from_nanos(31_400)), "31 µs"),
            (Value::Bytes(3 << 19), "1.5 MiB"),
            (Value::Count(0), "0"),
            (Value::Rate(12_345.6), "12346"),
            (Value::Throughput(1.5 * f64::from(1 << 30)), "1.50 GiB/s"),
        ] {
            assert_eq!(value.to_string(), text);
        }
    }

    #[test]
    fn the_table_compares_row_by_row() {
        let (mut theirs, mut ours) = (Measured::default(), Measured::default());
        theirs.time("start", Duration::from_secs(3));
        theirs.add("failed", Value::Count(0));
        theirs.time("idle", Duration::from_micros(20));
        ours.time("start", Duration::from_millis(200));
        ours.add("failed", Value::Count(0));
        ours.time("idle", Duration::from_millis(40));
        let size = Size::new(1000, 3).unwrap();
        let both = [(Kind::KubeProxy, theirs.clone()), (Kind::Pointsman, ours)];
        assert_eq!(
            table(size, &both),
            "| 1000 services × 3 endpoints | kube-proxy | Pointsman | ratio |\n|---|---:|---:|---:|\n\
             | start | 3.00 s | 200 ms | 15 |\n| failed | 0 | 0 |  |\n| idle | 20 µs | 40.0 ms | < 0.01 |\n"
        );
        assert_eq!(
            table(size, &[(Kind::KubeProxy, theirs)]),
            "| 1000 services × 3 endpoints | kube-proxy |\n|---|---:|\n| start | 3.00 s |\n| failed | 0 |\n| idle | 20 µs |\n"
        );
    }

    #[test]
    fn more_a_second_is_better_and_medians_are_of_each_row() {
        let rounds = [1.0, 9.0, 4.0].map(|rate| {
            let mut measured = Measured::default();
            measured.add("rate", Value::Rate(rate));
            measured.time("time", Duration::from_millis(10));
            measured
        });
        let (ours, mut theirs) = (Measured::median(&rounds), Measured::default());
        theirs.add("rate", Value::Rate(2.0));
        let column = |name: &str, compared| Column { name: name.to_owned(), compared };
        assert_eq!(
            comparison("", &[(column("a", false), theirs), (column("b", true), ours)]),
            "|  | a | b | ratio |\n|---|---:|---:|---:|\n| rate | 2 | 4 | 2.00 |\n| time | – | 10.0 ms |  |\n"
        );
    }
}
