//! The elements of one set.

use super::{Element, Tuple};

/// The elements of one set, each key once. Kept as one sorted block: a table of 20,000 Services has 130,000 of them, and the
/// agent holds two such tables when it compares what should be with what is. Cheap to make of many at once, not to change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Elements(Vec<Element>);

impl Elements {
    /// Without elements.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    fn find(&self, key: &Tuple) -> Result<usize, usize> {
        self.0.binary_search_by(|element| element.key.cmp(key))
    }

    /// The element with this key.
    #[must_use]
    pub fn get(&self, key: &Tuple) -> Option<&Element> {
        self.find(key).ok().and_then(|at| self.0.get(at))
    }

    /// Adds one, and returns the one with the same key that it replaces. Costs time in proportion to all that are there.
    pub fn insert(&mut self, element: Element) -> Option<Element> {
        let replaced = self.remove(&element.key);
        let (Ok(at) | Err(at)) = self.find(&element.key);
        self.0.insert(at, element);
        replaced
    }

    /// Takes one out. Costs time in proportion to all that are there.
    pub fn remove(&mut self, key: &Tuple) -> Option<Element> {
        self.find(key).ok().map(|at| self.0.remove(at))
    }

    /// All of them, by key.
    pub fn iter(&self) -> std::slice::Iter<'_, Element> {
        self.0.iter()
    }

    /// All of them in blocks of at most this size, by key.
    pub fn chunks(&self, size: usize) -> std::slice::Chunks<'_, Element> {
        self.0.chunks(size)
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Vec<Element>> for Elements {
    /// Of several with one key the last stays.
    fn from(mut elements: Vec<Element>) -> Self {
        elements.sort_by_key(|element| element.key);
        elements.dedup_by(|later, earlier| {
            let same = later.key == earlier.key;
            if same {
                std::mem::swap(later, earlier);
            }
            same
        });
        elements.shrink_to_fit();
        Self(elements)
    }
}

impl FromIterator<Element> for Elements {
    fn from_iter<T: IntoIterator<Item = Element>>(elements: T) -> Self {
        Self::from(elements.into_iter().collect::<Vec<_>>())
    }
}

impl IntoIterator for Elements {
    type Item = Element;
    type IntoIter = std::vec::IntoIter<Element>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a> IntoIterator for &'a Elements {
    type Item = &'a Element;
    type IntoIter = std::slice::Iter<'a, Element>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn element(key: u32, data: u32) -> Element {
        Element::new(Tuple::new().word(key)).with_data(Tuple::new().word(data))
    }

    #[test]
    fn of_several_elements_with_one_key_the_last_stays() {
        let elements = Elements::from(vec![element(2, 1), element(1, 1), element(2, 2), element(2, 3)]);
        assert_eq!(elements.iter().cloned().collect::<Vec<_>>(), [element(1, 1), element(2, 3)]);
        let mut one_by_one = Elements::new();
        for (key, data) in [(2, 1), (1, 1), (2, 2), (2, 3)] {
            one_by_one.insert(element(key, data));
        }
        assert_eq!(one_by_one, elements);
        assert_eq!(one_by_one.remove(&Tuple::new().word(1)), Some(element(1, 1)));
        assert_eq!(one_by_one.len(), 1);
    }
}
