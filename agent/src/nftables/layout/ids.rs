//! Numbers for things that come and go.

use std::collections::BTreeMap;

/// Numbers in use, each with what it stands for. A number that was given back is not handed out again before all others were: it
/// may live on for a while in what packets have written.
#[derive(Clone, Debug)]
pub(super) struct Ids<T> {
    used: BTreeMap<u32, T>,
    first: u32,
    last: u32,
    next: u32,
}

impl<T> Ids<T> {
    /// Numbers from `first` to `last`.
    pub(super) fn new((first, last): (u32, u32)) -> Self {
        Self { used: BTreeMap::new(), first, last, next: first }
    }

    /// A number for something new, or `None` if all are in use.
    pub(super) fn take(&mut self, what: T) -> Option<u32> {
        if self.used.len() > (self.last - self.first) as usize {
            return None;
        }
        let mut number = self.next;
        while self.used.contains_key(&number) {
            number = self.after(number);
        }
        self.next = self.after(number);
        self.used.insert(number, what);
        Some(number)
    }

    /// Takes a certain number, unless it is in use or is none of these. New ones are handed out behind it.
    pub(super) fn claim(&mut self, number: u32, what: T) -> bool {
        if number < self.first || number > self.last || self.used.contains_key(&number) {
            return false;
        }
        self.used.insert(number, what);
        if number >= self.next {
            self.next = self.after(number);
        }
        true
    }

    /// Gives a number back.
    pub(super) fn free(&mut self, number: u32) -> Option<T> {
        self.used.remove(&number)
    }

    /// What a number stands for.
    pub(super) fn get(&self, number: u32) -> Option<&T> {
        self.used.get(&number)
    }

    fn after(&self, number: u32) -> u32 {
        if number >= self.last { self.first } else { number + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_not_handed_out_again_at_once() {
        let mut ids = Ids::new((1, 4));
        assert_eq!([ids.take('a'), ids.take('b'), ids.take('c')], [Some(1), Some(2), Some(3)]);
        assert_eq!(ids.free(2), Some('b'));
        assert_eq!([ids.take('d'), ids.take('e'), ids.take('f')], [Some(4), Some(2), None]);
        assert_eq!([ids.get(2), ids.get(5)], [Some(&'e'), None]);
    }

    #[test]
    fn numbers_found_elsewhere_are_kept() {
        let mut ids = Ids::new((1, 4));
        assert!(ids.claim(3, 'a'));
        assert!(!ids.claim(3, 'b') && !ids.claim(0, 'b') && !ids.claim(5, 'b'));
        assert_eq!([ids.take('c'), ids.take('d'), ids.take('e')], [Some(4), Some(1), Some(2)]);
    }
}
