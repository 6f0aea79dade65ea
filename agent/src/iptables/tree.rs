//! Finds one of many capture rules in few steps: a tree of chains over the bits of an address, or of a port.
//!
//! In: captures, added and removed one at a time. Out: which blocks (chains) have other contents now, and what is in them.
//! No packet walks more than some 44 rules at 30,000 Services, and a change concerns a handful of small blocks
//! (`docs/adr`, iptables dispatch). Pure.
//!
//! - A block is a leaf, which holds captures, or an inner block, which holds disjoint smaller blocks.
//! - An inner block decides three bits. Bits that all its captures share are skipped.
//! - A leaf with more than [`SPLIT`] captures is split, an inner block with [`MERGE`] or fewer becomes a leaf again. The gap
//!   between the two keeps a Service that comes and goes from splitting and merging each time.
//! - The kernel walks at most 16 chains from a hook; at [`DEPTH`] a leaf grows instead of being split.

use std::collections::{BTreeMap, BTreeSet};

/// A leaf with more captures is split.
const SPLIT: usize = 16;
/// An inner block with so few captures becomes a leaf.
const MERGE: usize = 8;
/// Bits that one inner block decides.
const STEP: u8 = 3;
/// Blocks on the longest way down, the root included.
const DEPTH: usize = 8;

/// The values of which the first `length` of `width` bits are those of `bits`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Block {
    /// The first value; bits after `length` are 0. Right-aligned.
    pub bits: u128,
    /// How many leading bits are fixed.
    pub length: u8,
}

/// A tree over values of `width` bits; each value may have several captures, told apart by `K`.
#[derive(Clone, Debug)]
pub(super) struct Tree<K, V> {
    width: u8,
    root: Block,
    captures: BTreeMap<(u128, K), V>,
    /// Inner blocks with what they hold. A block that is not here is a leaf.
    blocks: BTreeMap<Block, Shape>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Shape {
    Leaf,
    Inner(BTreeSet<Block>),
}

/// Blocks that a change has touched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Touched {
    /// They exist and their contents are new.
    pub written: BTreeSet<Block>,
    /// They exist no more.
    pub removed: BTreeSet<Block>,
}

impl Touched {
    fn write(&mut self, block: Block) {
        self.removed.remove(&block);
        self.written.insert(block);
    }

    fn remove(&mut self, block: Block) {
        self.written.remove(&block);
        self.removed.insert(block);
    }
}

/// What is in a block.
#[derive(Debug)]
pub(super) enum Contents<'a, V> {
    /// Captures, in a fixed order.
    Captures(Vec<&'a V>),
    /// Smaller blocks, disjoint, in a fixed order.
    Blocks(Vec<Block>),
}

impl<K: Ord + Copy + Bounded, V: PartialEq> Tree<K, V> {
    /// An empty tree for the values of a block.
    pub(super) fn new(width: u8, root: Block) -> Self {
        Self { width, root, captures: BTreeMap::new(), blocks: BTreeMap::from([(root, Shape::Leaf)]) }
    }

    /// A tree that holds these captures from the start.
    #[cfg(test)]
    pub(super) fn build(width: u8, root: Block, captures: BTreeMap<(u128, K), V>) -> Self {
        let mut tree = Self { captures, ..Self::new(width, root) };
        let mut touched = Touched::default();
        tree.grow_root(&mut touched);
        tree
    }

    /// Whether it holds no captures.
    pub(super) fn is_empty(&self) -> bool {
        self.captures.is_empty()
    }

    /// How many rules it takes: one per capture, and one per block that is not the root.
    pub(super) fn rules(&self) -> usize {
        self.captures.len() + self.blocks.len() - 1
    }

    /// The block that everything is in.
    pub(super) fn root(&self) -> Block {
        self.root
    }

    /// All blocks.
    pub(super) fn blocks(&self) -> impl Iterator<Item = Block> {
        self.blocks.keys().copied()
    }

    /// What is in a block.
    pub(super) fn contents(&self, block: Block) -> Contents<'_, V> {
        match self.blocks.get(&block) {
            Some(Shape::Inner(children)) => Contents::Blocks(children.iter().copied().collect()),
            _ => Contents::Captures(self.range(block).map(|(_, value)| value).collect()),
        }
    }

    /// Adds or replaces a capture.
    pub(super) fn insert(&mut self, bits: u128, key: K, value: V, touched: &mut Touched) {
        if self.captures.get(&(bits, key)) == Some(&value) {
            return;
        }
        self.captures.insert((bits, key), value);
        let mut path = vec![self.root];
        loop {
            let block = path[path.len() - 1];
            let Some(Shape::Inner(children)) = self.blocks.get(&block) else { break };
            let slot = self.slot(block, bits);
            let Some(child) = children.iter().copied().find(|child| self.holds(slot, child.bits)) else {
                // Nothing in this slot yet.
                self.attach(block, slot, touched);
                self.blocks.insert(slot, Shape::Leaf);
                touched.write(slot);
                return;
            };
            if self.holds(child, bits) {
                path.push(child);
                continue;
            }
            // The child skips bits that the new value does not share.
            self.detach(block, child, touched);
            let common = self.common(slot, child.bits, bits);
            if path.len() + 1 + self.height(child) <= DEPTH {
                let leaf = self.slot(common, bits);
                self.blocks.insert(common, Shape::Inner(BTreeSet::from([child, leaf])));
                self.blocks.insert(leaf, Shape::Leaf);
                touched.write(common);
                touched.write(leaf);
                self.attach(block, common, touched);
            } else {
                self.fell(child, touched);
                let grown = self.grow(slot, path.len() + 1, touched);
                self.attach(block, grown, touched);
            }
            return;
        }
        let leaf = path[path.len() - 1];
        touched.write(leaf);
        if self.range(leaf).count() <= SPLIT || path.len() >= DEPTH {
            return;
        }
        match path.len().checked_sub(2).map(|index| path[index]) {
            None => self.grow_root(touched),
            Some(parent) => {
                self.detach(parent, leaf, touched);
                self.fell(leaf, touched);
                let grown = self.grow(leaf, path.len(), touched);
                self.attach(parent, grown, touched);
            }
        }
    }

    /// Removes a capture.
    pub(super) fn remove(&mut self, bits: u128, key: K, touched: &mut Touched) {
        if self.captures.remove(&(bits, key)).is_none() {
            return;
        }
        let mut path = vec![self.root];
        while let Some(Shape::Inner(children)) = self.blocks.get(&path[path.len() - 1]) {
            let Some(child) = children.iter().copied().find(|child| self.holds(*child, bits)) else { return };
            path.push(child);
        }
        let leaf = path[path.len() - 1];
        touched.write(leaf);
        if path.len() > 1 && self.range(leaf).next().is_none() {
            path.pop();
            self.detach(path[path.len() - 1], leaf, touched);
            self.fell(leaf, touched);
        }
        // From below upwards: what has become small is merged, what leads to one block only is left out.
        while let Some(block) = path.pop() {
            let Some(Shape::Inner(children)) = self.blocks.get(&block) else { continue };
            let only = children.first().copied().filter(|_| children.len() == 1);
            let small = self.range(block).take(MERGE + 1).count() <= MERGE;
            match (path.last().copied(), only) {
                (None, _) if small => {
                    self.fell(block, touched);
                    self.blocks.insert(block, Shape::Leaf);
                    touched.write(block);
                }
                (Some(parent), _) if small => {
                    self.detach(parent, block, touched);
                    self.fell(block, touched);
                    let slot = self.slot(parent, block.bits);
                    self.blocks.insert(slot, Shape::Leaf);
                    touched.write(slot);
                    self.attach(parent, slot, touched);
                }
                (Some(parent), Some(only)) => {
                    self.detach(parent, block, touched);
                    self.blocks.remove(&block);
                    touched.remove(block);
                    if self.blocks.get(&only) == Some(&Shape::Leaf) {
                        // A leaf fills its slot.
                        let slot = self.slot(parent, only.bits);
                        self.blocks.remove(&only);
                        touched.remove(only);
                        self.blocks.insert(slot, Shape::Leaf);
                        touched.write(slot);
                        self.attach(parent, slot, touched);
                    } else {
                        self.attach(parent, only, touched);
                    }
                }
                _ => {}
            }
        }
    }

    /// Makes blocks for the captures in a slot that has none; returns the uppermost.
    fn grow(&mut self, slot: Block, depth: usize, touched: &mut Touched) -> Block {
        let ends = (self.range(slot).next(), self.range(slot).next_back());
        let (Some((first, _)), Some((last, _))) = ends else { return self.leaf(slot, touched) };
        let common = self.common(slot, first.0, last.0);
        if depth >= DEPTH || common.length >= self.width || self.range(slot).take(SPLIT + 1).count() <= SPLIT
        {
            return self.leaf(slot, touched);
        }
        self.inner(common, depth, touched);
        common
    }

    fn grow_root(&mut self, touched: &mut Touched) {
        if self.range(self.root).take(SPLIT + 1).count() > SPLIT && self.root.length < self.width {
            self.inner(self.root, 1, touched);
        }
    }

    fn leaf(&mut self, block: Block, touched: &mut Touched) -> Block {
        self.blocks.insert(block, Shape::Leaf);
        touched.write(block);
        block
    }

    fn inner(&mut self, block: Block, depth: usize, touched: &mut Touched) {
        let mut children = BTreeSet::new();
        let mut next = Some(block.bits);
        while let Some(from) = next {
            let Some((value, _)) = self.captures.range((from, K::LEAST)..).next().map(|(key, _)| *key) else {
                break;
            };
            if !self.holds(block, value) {
                break;
            }
            let slot = self.slot(block, value);
            children.insert(self.grow(slot, depth + 1, touched));
            next = self.last(slot).checked_add(1);
        }
        self.blocks.insert(block, Shape::Inner(children));
        touched.write(block);
    }

    /// Removes a block and all below it.
    fn fell(&mut self, block: Block, touched: &mut Touched) {
        if let Some(Shape::Inner(children)) = self.blocks.remove(&block) {
            for child in children {
                self.fell(child, touched);
            }
        }
        touched.remove(block);
    }

    fn attach(&mut self, parent: Block, child: Block, touched: &mut Touched) {
        if let Some(Shape::Inner(children)) = self.blocks.get_mut(&parent) {
            children.insert(child);
            touched.write(parent);
        }
    }

    fn detach(&mut self, parent: Block, child: Block, touched: &mut Touched) {
        if let Some(Shape::Inner(children)) = self.blocks.get_mut(&parent) {
            children.remove(&child);
            touched.write(parent);
        }
    }

    fn height(&self, block: Block) -> usize {
        match self.blocks.get(&block) {
            Some(Shape::Inner(children)) => {
                1 + children.iter().map(|child| self.height(*child)).max().unwrap_or_default()
            }
            _ => 1,
        }
    }

    fn range(&self, block: Block) -> impl DoubleEndedIterator<Item = (&(u128, K), &V)> {
        self.captures.range((block.bits, K::LEAST)..=(self.last(block), K::GREATEST))
    }

    /// The last value in a block.
    pub(super) fn last(&self, block: Block) -> u128 {
        block.bits | low_bits(self.width - block.length)
    }

    fn holds(&self, block: Block, value: u128) -> bool {
        (block.bits..=self.last(block)).contains(&value)
    }

    fn truncate(&self, value: u128, length: u8) -> Block {
        Block { bits: value & !low_bits(self.width - length), length }
    }

    /// The part of an inner block that a value is in.
    fn slot(&self, block: Block, value: u128) -> Block {
        self.truncate(value, (block.length + STEP).min(self.width))
    }

    /// The smallest block in a slot that holds both values, rounded down to whole steps.
    fn common(&self, slot: Block, one: u128, other: u128) -> Block {
        let differing = 128 - (one ^ other).leading_zeros();
        let shared = self.width.saturating_sub(u8::try_from(differing).unwrap_or(u8::MAX));
        if shared >= self.width {
            return self.truncate(one, self.width);
        }
        let steps = shared.saturating_sub(slot.length) / STEP;
        self.truncate(one, slot.length + steps * STEP)
    }
}

fn low_bits(count: u8) -> u128 {
    if count >= 128 { u128::MAX } else { (1 << count) - 1 }
}

/// A type with a least and a greatest value.
pub(super) trait Bounded {
    /// The least.
    const LEAST: Self;
    /// The greatest.
    const GREATEST: Self;
}

#[cfg(test)]
mod tests;
