//! From measurements to a page.
//!
//! In: what was measured of each program at each size. Out: a table in Markdown with ratios, and a page of which one
//! section is replaced.

use std::fmt::Write;
use std::time::Duration;

use super::program::Kind;

/// A number with its unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value {
    /// A time.
    Time(Duration),
    /// Memory in bytes.
    Bytes(u64),
    /// A number of things.
    Count(usize),
}

impl Value {
    fn number(self) -> f64 {
        match self {
            Self::Time(time) => time.as_secs_f64(),
            #[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
            Self::Bytes(bytes) => bytes as f64,
            #[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
            Self::Count(count) => count as f64,
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
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measured(Vec<(&'static str, Value)>);

impl Measured {
    /// Adds a row.
    pub fn add(&mut self, what: &'static str, value: Value) {
        self.0.push((what, value));
    }

    /// Adds a row with a time.
    pub fn time(&mut self, what: &'static str, time: Duration) {
        self.add(what, Value::Time(time));
    }

    fn get(&self, what: &str) -> Option<Value> {
        self.0.iter().find(|(row, _)| *row == what).map(|(_, value)| *value)
    }
}

/// The table of one size. The ratio is kube-proxy's value in Pointsman's.
#[must_use]
pub fn table(size: u32, columns: &[(Kind, Measured)]) -> String {
    let mut text = format!("| {size} services |");
    for (kind, _) in columns {
        let _ = write!(text, " {kind} |");
    }
    let both = columns.len() == 2;
    text += if both { " ratio |\n|---|" } else { "\n|---|" };
    text += &"---:|".repeat(columns.len() + usize::from(both));
    text.push('\n');
    let Some((_, first)) = columns.first() else { return text };
    for (what, _) in &first.0 {
        let _ = write!(text, "| {what} |");
        let values: Vec<Option<Value>> = columns.iter().map(|(_, measured)| measured.get(what)).collect();
        for value in &values {
            let _ = write!(text, " {} |", value.map_or_else(|| "–".to_owned(), |value| value.to_string()));
        }
        if both {
            let _ = write!(text, " {} |", ratio(columns, &values));
        }
        text.push('\n');
    }
    text
}

fn ratio(columns: &[(Kind, Measured)], values: &[Option<Value>]) -> String {
    let of = |wanted: Kind| {
        let place = columns.iter().position(|(kind, _)| *kind == wanted)?;
        values.get(place).copied().flatten().map(Value::number)
    };
    match (of(Kind::KubeProxy), of(Kind::Pointsman)) {
        (Some(theirs), Some(ours)) if ours > 0.0 && theirs > 0.0 => {
            let ratio = theirs / ours;
            match ratio {
                ..0.01 => "< 0.01".to_owned(),
                ..10.0 => format!("{ratio:.2}"),
                _ => format!("{ratio:.0}"),
            }
        }
        _ => String::new(),
    }
}

/// `page` with the section called `name` replaced by `section`, or with the section at its end.
#[must_use]
pub fn with_section(page: &str, name: &str, section: &str) -> String {
    let (begin, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->\n"));
    let section = format!("{begin}{section}{end}");
    match (page.find(&begin), page.find(&end)) {
        (Some(from), Some(to)) if from < to => {
            format!("{}{section}{}", &page[..from], &page[to + end.len()..])
        }
        _ => format!("{}\n\n{section}", page.trim_end()),
    }
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
        let both = [(Kind::KubeProxy, theirs.clone()), (Kind::Pointsman, ours)];
        assert_eq!(
            table(1000, &both),
            "| 1000 services | kube-proxy | Pointsman | ratio |\n|---|---:|---:|---:|\n\
             | start | 3.00 s | 200 ms | 15 |\n| failed | 0 | 0 |  |\n| idle | 20 µs | 40.0 ms | < 0.01 |\n"
        );
        assert_eq!(
            table(1000, &[(Kind::KubeProxy, theirs)]),
            "| 1000 services | kube-proxy |\n|---|---:|\n| start | 3.00 s |\n| failed | 0 |\n| idle | 20 µs |\n"
        );
    }

    #[test]
    fn a_section_is_replaced_or_added() {
        let page = with_section("# Page\n", "a", "one\n");
        assert_eq!(page, "# Page\n\n<!-- begin a -->\none\n<!-- end a -->\n");
        let page = with_section(&page, "b", "two\n");
        let page = with_section(&page, "a", "three\n");
        assert_eq!(
            page,
            "# Page\n\n<!-- begin a -->\nthree\n<!-- end a -->\n\n<!-- begin b -->\ntwo\n<!-- end b -->\n"
        );
    }
}
